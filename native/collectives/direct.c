#include "direct.h"

/* The i-th other member, beginning with the next one: if all began with rank 0, they would queue up there. */
static inline int32_t other(const mlxdist_group *group, int32_t i) { return (group->rank + i) % group->size; }

/* In rank order, which is the order of the reduction. */
static inline void receive_from_all(struct operation *operation, uint64_t bytes) {
  const mlxdist_group *group = operation_group(operation);
  for (int32_t member = 0; member < group->size; member++)
    if (member != group->rank) operation_receive(operation, member, 0, bytes);
}

void direct_all_reduce(struct operation *operation, const struct reduction *reduction, const char *in, char *out) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  for (int32_t i = 1; i < group->size; i++) operation_send(operation, other(group, i), in, reduction->bytes);
  receive_from_all(operation, reduction->bytes);
  reduction_add(operation, reduction, in, group->rank, out, in == out);
}

void direct_reduce_scatter(struct operation *operation, const struct reduction *reduction, const char *in, char *out) {
  const struct chunks *chunks = &reduction->chunks;
  const mlxdist_group *group = operation_group(operation);
  const char *own = in + chunk_offset(chunks, group->rank);
  operation_round(operation);
  for (int32_t i = 1; i < group->size; i++) {
    int32_t member = other(group, i);
    operation_send(operation, member, in + chunk_offset(chunks, member), chunk_bytes(chunks, member));
  }
  receive_from_all(operation, chunk_bytes(chunks, group->rank));
  /* No other rank reads its own chunk; elsewhere in `in` lie those of others. */
  bool in_place = out >= in && out < in + reduction->bytes && out != own;
  reduction_add(operation, reduction, own, group->rank, out, in_place);
}

void direct_all_gather(struct operation *operation, const struct chunks *chunks, const char *own, char *out) {
  const mlxdist_group *group = operation_group(operation);
  uint64_t bytes = chunk_bytes(chunks, group->rank);
  operation_round(operation);
  operation_copy(operation, out + chunk_offset(chunks, group->rank), own, bytes);
  for (int32_t i = 1; i < group->size; i++) operation_send(operation, other(group, i), own, bytes);
  for (int32_t i = 1; i < group->size; i++) {
    int32_t member = other(group, i);
    operation_receive(operation, member, out + chunk_offset(chunks, member), chunk_bytes(chunks, member));
  }
}

void direct_reduce(struct operation *operation, const struct reduction *reduction, const char *in, char *out,
                   int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  if (group->rank != root) {
    operation_send(operation, root, in, reduction->bytes);
    return;
  }
  for (int32_t member = 0; member < group->size; member++)
    if (member != root) operation_receive(operation, member, 0, reduction->bytes);
  reduction_add(operation, reduction, in, root, out, false);
}

void direct_broadcast(struct operation *operation, char *data, uint64_t bytes, int32_t root) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  if (group->rank != root) operation_receive(operation, root, data, bytes);
  for (int32_t member = 0; member < group->size && group->rank == root; member++)
    if (member != root) operation_send(operation, member, data, bytes);
}

void direct_star(struct operation *operation, const struct reduction *reduction, const char *in, char *out) {
  direct_reduce(operation, reduction, in, out, 0);
  direct_broadcast(operation, out, reduction->bytes, 0);
}

void direct_barrier(struct operation *operation) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  for (int32_t i = 1; i < group->size; i++) {
    operation_send(operation, other(group, i), 0, 0);
    operation_receive(operation, other(group, i), 0, 0);
  }
}
