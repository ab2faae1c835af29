#include "mesh.h"

#include <string.h>

static int check_divisible(const mlxdist_layout *layout, int32_t size) {
  if (layout->ndim >= 1 && layout->shape[0] % size == 0) return MLXDIST_OK;
  return fail(MLXDIST_INVALID_ARGUMENT, "sum_scatter over %d ranks needs a first dimension that is a multiple of %d, "
              "not %lld", size, size, layout->ndim ? (long long)layout->shape[0] : 0ll);
}

int mlxdist_reduce_scatter(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout, int32_t op) {
  uint64_t started;
  int32_t size = group->engine.size;
  fold_kernel kernel = mesh_kernel("reduce_scatter", layout, op);
  if (!kernel) return MLXDIST_INVALID_ARGUMENT;
  int status = check_divisible(layout, size);
  if (!status) status = operation_begin(group, "reduce_scatter", layout, &started);
  if (status) return status;
  if (size == 1) {
    if (out != in) memcpy(out, in, layout_bytes(layout));
  } else {
    struct wire_descriptor descriptor = layout_describe(WIRE_REDUCE_SCATTER, layout, op, -1);
    status = mesh_reduce_parts(group, &descriptor, kernel, in, out, layout_count(layout),
                               mlxdist_dtype_size(layout->dtype));
  }
  return operation_end(group, status, started, &group->engine.counters.collectives);
}
