# SPDX-License-Identifier: Apache-2.0
"""Dense multi-head latent attention: decoding, ragged queries, and writing its caches."""
