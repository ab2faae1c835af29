/*
 * Reductions of n arrays into one, element by element, in the order of the sources.
 *
 * 16-bit floats are accumulated in float32 and rounded once, to nearest even. Integers wrap. max and min
 * propagate NaN as numpy.maximum does; complex numbers are ordered by real, then imaginary part.
 */
#pragma once

#include <stdint.h>

/* `out` may be one of the sources. Pointers are aligned to their element. `sources_count` is at least 1. */
typedef void (*reduce_kernel_fn)(void* out, const void* const* sources, int sources_count, uint64_t count);

/* The kernel for a mlxdist_dtype and mlxdist_op, NULL if one of them is unknown. */
reduce_kernel_fn reduce_kernel(int32_t dtype, int32_t op);
