// SPDX-License-Identifier: Apache-2.0
// MLA attention of batch-invariant requests over a 16-bit cache: mla_decode, but a CTA may have all partial results of
// a request. Consumers leave each but the last in the plan's buffer, and add them up at the end with the bits that
// several CTAs would combine. Loaders see one segment.
//
// Roles, time line, barriers and budget: those of mla/mla_decode.cu. The query rows stay for all partial results. With
// each of them query_free completes a phase. Consumers wait for it themselves, except for the last: such a part has no
// other place, so query warps do not.
#include "mla/mla_decode.cu"
#include "mla/mla_decode_invariant/consumer.cuh"
