// SPDX-License-Identifier: Apache-2.0
// Logit soft-capping, which is applied to scores before the softmax.
#pragma once
#include "ptx/convert.cuh"
#include "ptx/types.cuh"

namespace cumla::attend {

using namespace ptx;

// tanh(x) = 1 - 2 / (1 + 2^y), where y = 2 x log2(e). The approximations have an absolute error, which a large cap
// would multiply. So small |x| takes a polynomial, whose error is relative to x.
__device__ __forceinline__ float tanh_of(float y) {
  const float square = y * y;
  const float factor = __fmaf_rn(__fmaf_rn(__fmaf_rn(-2.945801e-5f, square, 6.6487053e-4f), square, -1.3875669e-2f),
                                 square, 0.34657358f);
  const float quotient = 1.0f - 2.0f * reciprocal_approx(1.0f + exp2_approx(y));
  return fabsf(y) < 1.0f ? y * factor : quotient;
}

}  // namespace cumla::attend
