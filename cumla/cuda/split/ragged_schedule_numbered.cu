// SPDX-License-Identifier: Apache-2.0
// The ragged schedule whose places have the numbers of their requests, for kernels that read an array with a number
// per request: attention with a mask. A block table's row is such a number, an entry of a page list is none.
//
// Roles, time line and budget: those of split/ragged_schedule.cu.
#define CUMLA_NUMBERS_REQUESTS
#include "split/ragged_schedule.cu"
