/* A sum over all ranks, checked: what the engine's tests send most. */
#pragma once

#include "world.h"

static inline int32_t sums_value(int rank, uint64_t i) { return (int32_t)(i * 7 + (uint64_t)rank * 1000003); }

/* The operation's status; a wrong result ends the test. */
static inline int all_sum(mlxdist_group* group, int rank, int size, uint64_t count) {
  mlxdist_layout layout = {.dtype = MLXDIST_INT32, .ndim = 1, .shape = {(int64_t)count}};
  int32_t *in = calloc(count, sizeof *in), *out = calloc(count, sizeof *out);
  REQUIRE(in && out);
  for (uint64_t i = 0; i < count; i++) in[i] = sums_value(rank, i);
  int status = mlxdist_all_reduce(group, in, out, &layout, MLXDIST_SUM, 0);
  for (uint64_t i = 0; i < count && !status; i++) {
    int64_t sum = 0;
    for (int other = 0; other < size; other++) sum += sums_value(other, i);
    REQUIRE(out[i] == (int32_t)sum);
  }
  free(in);
  free(out);
  return status;
}
