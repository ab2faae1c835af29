/*
 * The kernels of each instruction set. reduce_kernel() takes the best ones that this processor can run; the tests
 * compare them all.
 */
#pragma once

#include "mlxdist.h"
#include "reduce.h"

enum { REDUCE_DTYPES = MLXDIST_COMPLEX64 + 1, REDUCE_OPS = MLXDIST_PROD + 1 };

/* NULL: the instruction set has nothing better than the one before it. */
typedef const reduce_kernel_fn reduce_table[REDUCE_DTYPES][REDUCE_OPS];

#define REDUCE_ROW_OF(sum, prod, max, min) \
  {[MLXDIST_SUM] = (sum), [MLXDIST_PROD] = (prod), [MLXDIST_MAX] = (max), [MLXDIST_MIN] = (min)}
#define REDUCE_ROW(suffix) REDUCE_ROW_OF(sum_##suffix, prod_##suffix, max_##suffix, min_##suffix)

extern reduce_table reduce_baseline; /* whatever every processor of the architecture has: SSE2 on x86-64 */
extern reduce_table reduce_avx2, reduce_avx512, reduce_neon;

/* How many instruction sets this processor has kernels for, at least 1. The last is the best. */
int reduce_isas(void);

/* `isa` counts from 0. */
const char* reduce_isa_name(int isa);

/* As reduce_kernel, for one of this processor's instruction sets. */
reduce_kernel_fn reduce_kernel_of(int isa, int32_t dtype, int32_t op);
