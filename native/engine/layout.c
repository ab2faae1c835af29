#include "layout.h"

#include "error.h"
#include "group.h"

#include <stdio.h>
#include <string.h>

const uint32_t layout_element_bytes[LAYOUT_DTYPES] = {
    [MLXDIST_BOOL] = 1,     [MLXDIST_UINT8] = 1,     [MLXDIST_UINT16] = 2,  [MLXDIST_UINT32] = 4,
    [MLXDIST_UINT64] = 8,   [MLXDIST_INT8] = 1,      [MLXDIST_INT16] = 2,   [MLXDIST_INT32] = 4,
    [MLXDIST_INT64] = 8,    [MLXDIST_FLOAT16] = 2,   [MLXDIST_FLOAT32] = 4, [MLXDIST_FLOAT64] = 8,
    [MLXDIST_BFLOAT16] = 2, [MLXDIST_COMPLEX64] = 8,
};

static const char *const names[LAYOUT_DTYPES] = {
    [MLXDIST_BOOL] = "bool",         [MLXDIST_UINT8] = "uint8",         [MLXDIST_UINT16] = "uint16",
    [MLXDIST_UINT32] = "uint32",     [MLXDIST_UINT64] = "uint64",       [MLXDIST_INT8] = "int8",
    [MLXDIST_INT16] = "int16",       [MLXDIST_INT32] = "int32",         [MLXDIST_INT64] = "int64",
    [MLXDIST_FLOAT16] = "float16",   [MLXDIST_FLOAT32] = "float32",     [MLXDIST_FLOAT64] = "float64",
    [MLXDIST_BFLOAT16] = "bfloat16", [MLXDIST_COMPLEX64] = "complex64",
};

uint32_t mlxdist_dtype_size(int32_t dtype) { return layout_dtype_size(dtype); }

const char *mlxdist_dtype_name(int32_t dtype) { return layout_dtype_size(dtype) ? names[dtype] : "unknown"; }

int layout_check(const char *operation, const mlxdist_layout *layout) {
  if (!layout) return MLXDIST_OK;
  uint64_t bytes = layout_dtype_size(layout->dtype);
  if (!bytes) return fail(MLXDIST_INVALID_ARGUMENT, "%s: unknown dtype %d", operation, layout->dtype);
  if (layout->ndim < 0 || layout->ndim > LAYOUT_DIMENSIONS)
    return fail(MLXDIST_INVALID_ARGUMENT, "%s: %d dimensions; fold the trailing ones into %d", operation, layout->ndim,
                LAYOUT_DIMENSIONS);
  for (int i = 0; i < layout->ndim; i++)
    if (layout->shape[i] < 0 || __builtin_mul_overflow(bytes, (uint64_t)layout->shape[i], &bytes))
      return fail(MLXDIST_INVALID_ARGUMENT, "%s: dimension %d of %lld makes no array", operation, i,
                  (long long)layout->shape[i]);
  return MLXDIST_OK;
}

const char *layout_operation(const struct wire_descriptor *descriptor) {
  static const char *const reductions[] = {"all_sum", "all_max", "all_min", "all_prod"};
  static const char *const scatters[] = {"sum_scatter", "max_scatter", "min_scatter", "prod_scatter"};
  static const char *const reduces[] = {"reduce (sum)", "reduce (max)", "reduce (min)", "reduce (prod)"};
  unsigned reduction = descriptor->reduction & 3;
  switch (descriptor->operation) {
    case MLXDIST_ALL_REDUCE: return reductions[reduction];
    case MLXDIST_REDUCE_SCATTER: return scatters[reduction];
    case MLXDIST_ALL_GATHER: return "all_gather";
    case MLXDIST_BROADCAST: return "broadcast";
    case MLXDIST_BARRIER: return "barrier";
    case WIRE_SEND: return "send/recv";
    case WIRE_FINALIZE: return "finalize";
    case MLXDIST_REDUCE: return reduces[reduction];
    case MLXDIST_GATHER: return "gather";
    case MLXDIST_SCATTER: return "scatter";
    case MLXDIST_ALL_TO_ALL: return "all_to_all";
    case WIRE_ALL_TO_ALL_V: return "all_to_all_v";
    case WIRE_SPLIT: return "split";
    default: return "an unknown operation";
  }
}

const char *layout_message(bool sends, bool receives) { return !sends ? "recv" : receives ? "sendrecv" : "send"; }

bool layout_has_array(const struct wire_descriptor *descriptor) {
  return descriptor->operation != MLXDIST_BARRIER && descriptor->operation != WIRE_FINALIZE &&
         descriptor->operation != WIRE_SPLIT;
}

struct layout_name layout_name(const struct wire_descriptor *descriptor, uint64_t sequence) {
  struct layout_name name;
  char *text = name.text;
  const size_t bytes = sizeof name.text;
  int n = snprintf(text, bytes, "%s", layout_operation(descriptor));
  if (sequence) n += snprintf(text + n, bytes - (size_t)n, " #%llu", (unsigned long long)sequence);
  if (descriptor->root >= 0) n += snprintf(text + n, bytes - (size_t)n, " with root %d", descriptor->root);
  if (!layout_has_array(descriptor)) return name;
  n += snprintf(text + n, bytes - (size_t)n, " of %s [", mlxdist_dtype_name(descriptor->dtype));
  for (int i = 0; i < descriptor->ndim && i < LAYOUT_DIMENSIONS && (size_t)n < bytes; i++)
    n += snprintf(text + n, bytes - (size_t)n, "%s%lld", i ? ", " : "", (long long)descriptor->shape[i]);
  if ((size_t)n < bytes) snprintf(text + n, bytes - (size_t)n, "]");
  return name;
}

struct group_name group_name(uint16_t id) {
  struct group_name name = {""};
  id &= (uint16_t)~GROUP_INTERNAL;
  if (id == GROUP_STREAM_LANE) return (struct group_name){" in mx.distributed"};
  if (id) snprintf(name.text, sizeof name.text, " in group %u", id);
  return name;
}
