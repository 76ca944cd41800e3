// SPDX-License-Identifier: Apache-2.0
// Structs that the kernels for shared prefixes share.
#pragma once

namespace cumla::split {

// The keys that a query token attends to.
enum PrefixState : int { kNoRequest, kRest, kPrefixAndRest };

}  // namespace cumla::split
