#include "algorithm.h"
#include "direct.h"
#include "hierarchical.h"

/* On all ranks alike: those that have all links would wait for the others. */
static int check_connected(const mlxdist_group *group, const char *name) {
  if (group->fully_connected) return MLXDIST_OK;
  return fail(MLXDIST_INVALID_ARGUMENT, "%s needs a link between every two ranks (MLXDIST_TOPOLOGY)", name);
}

int mlxdist_all_to_all(mlxdist_group *group, const void *in, void *out, const mlxdist_layout *layout,
                       mlxdist_call *call) {
  struct operation *operation;
  int status = layout_check("all_to_all", layout);
  if (!status) status = check_divisible(group, "all_to_all", layout);
  if (!status) status = check_connected(group, "all_to_all");
  if (status) return status;
  status = collective_new(group, "all_to_all", MLXDIST_ALL_TO_ALL, layout, 0, -1, &operation);
  if (status) return status;
  uint64_t bytes = layout_bytes(layout) / (uint64_t)group->size;
  if (algorithm_of(operation) == MLXDIST_HIERARCHICAL)
    hierarchical_all_to_all(operation, bytes, in, out);
  else
    direct_all_to_all(operation, bytes, in, out);
  return operation_start(operation, call);
}

/* The chunks must have sizes, and a sum, of 64 bits. */
static int check_counts(const mlxdist_group *group, const uint64_t *counts, uint64_t row_bytes) {
  uint64_t total = 0, bytes;
  for (int32_t member = 0; member < group->size; member++)
    if (__builtin_mul_overflow(counts[member], row_bytes, &bytes) || __builtin_add_overflow(total, bytes, &total))
      return fail(MLXDIST_INVALID_ARGUMENT, "all_to_all_v: %llu rows for rank %d make no array",
                  (unsigned long long)counts[member], member);
  return MLXDIST_OK;
}

/* Direct only: a rank knows the counts of its own chunks, so those of its host could not place what it passes on before
 * the counts had gone round, and that takes as long as the messages that it would save. */
int mlxdist_all_to_all_v(mlxdist_group *group, const void *in, const uint64_t *send_counts, void *out,
                         const uint64_t *receive_counts, const mlxdist_layout *row, mlxdist_call *call) {
  struct operation *operation;
  int status = layout_check("all_to_all_v", row);
  if (!status) status = check_connected(group, "all_to_all_v");
  if (status) return status;
  uint64_t row_bytes = layout_bytes(row);
  status = check_counts(group, send_counts, row_bytes);
  if (!status) status = check_counts(group, receive_counts, row_bytes);
  int32_t rank = group->rank;
  if (!status && send_counts[rank] != receive_counts[rank])
    status = fail(MLXDIST_INVALID_ARGUMENT, "all_to_all_v: rank %d sends %llu rows to itself, but receives %llu", rank,
                  (unsigned long long)send_counts[rank], (unsigned long long)receive_counts[rank]);
  struct wire_descriptor descriptor = layout_describe(WIRE_ALL_TO_ALL_V, row, 0, -1, MLXDIST_DIRECT);
  if (!status) status = operation_new(group, &descriptor, &operation);
  if (status) return status;
  operation_round(operation);
  const char *from = in;
  char *to = out;
  for (int32_t member = 0; member < group->size; member++) {
    uint64_t leaving = send_counts[member] * row_bytes, arriving = receive_counts[member] * row_bytes;
    if (member == rank) {
      operation_copy(operation, to, from, leaving);
    } else {
      operation_send(operation, member, from, leaving);
      operation_receive(operation, member, to, arriving);
    }
    from += leaving;
    to += arriving;
  }
  return operation_start(operation, call);
}
