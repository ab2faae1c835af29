/* Which algorithm an operation uses: forced, from the measured table, or by default. Equal on all ranks. */
#pragma once

#include "chunks.h"

/* `layout` is that of the operation's input, NULL where there is none. */
enum mlxdist_algorithm choose(const mlxdist_group* group, enum mlxdist_operation operation,
                              const mlxdist_layout* layout);

/* A new operation by the algorithm that is chosen for it, if the links of the group allow that one. `reduction` is 0,
 * and `root` -1, where there is none. */
static inline int collective_new(mlxdist_group* group, const char* name, int32_t as, const mlxdist_layout* layout,
                                 int32_t reduction, int32_t root, struct operation** operation) {
  enum mlxdist_algorithm algorithm = choose(group, as == WIRE_FINALIZE ? MLXDIST_BARRIER : as, layout);
  struct wire_descriptor descriptor = layout_describe(as, layout, reduction, root, algorithm);
  int status = algorithm == MLXDIST_RING ? check_ring(group, name) : MLXDIST_OK;
  return status ? status : operation_new(group, &descriptor, operation);
}

static inline enum mlxdist_algorithm algorithm_of(const struct operation* operation) {
  return operation->sends.algorithm;
}
