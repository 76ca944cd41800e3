// SPDX-License-Identifier: Apache-2.0
// What kernels for shared prefixes agree on.
#pragma once

namespace cumla::split {

// What a query token attends to.
enum PrefixState : int { kNoRequest, kRest, kPrefixAndRest };

}  // namespace cumla::split
