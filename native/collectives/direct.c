#include "direct.h"

/* The i-th other member, beginning with the next one: if all began with the first, they would queue up there. */
static inline int32_t other(const struct subset *subset, int32_t i) { return (subset->place + i) % subset->size; }

/* In the order of the subset, which is that of the reduction. */
static inline void receive_from_all(struct operation *operation, const struct subset *subset, uint64_t bytes) {
  for (int32_t place = 0; place < subset->size; place++)
    if (place != subset->place) operation_receive(operation, subset_member(subset, place), 0, bytes);
}

void direct_all_reduce(struct operation *operation, const struct subset *subset, const struct reduction *reduction,
                       const char *in, char *out) {
  operation_round(operation);
  for (int32_t i = 1; i < subset->size; i++)
    operation_send(operation, subset_member(subset, other(subset, i)), in, reduction->bytes);
  receive_from_all(operation, subset, reduction->bytes);
  reduction_add(operation, reduction, in, subset->place, out, in == out);
}

void direct_reduce_scatter(struct operation *operation, const struct subset *subset, const struct reduction *reduction,
                           const char *in, char *out) {
  const struct chunks *chunks = &reduction->chunks;
  const char *own = in + chunk_offset(chunks, subset->place);
  operation_round(operation);
  for (int32_t i = 1; i < subset->size; i++) {
    int32_t place = other(subset, i);
    operation_send(operation, subset_member(subset, place), in + chunk_offset(chunks, place),
                   chunk_bytes(chunks, place));
  }
  receive_from_all(operation, subset, chunk_bytes(chunks, subset->place));
  /* No other rank reads its own chunk; elsewhere in `in` lie those of others. */
  bool in_place = out >= in && out < in + reduction->bytes && out != own;
  reduction_add(operation, reduction, own, subset->place, out, in_place);
}

void direct_all_gather(struct operation *operation, const struct subset *subset, const struct chunks *chunks,
                       const char *own, char *out) {
  uint64_t bytes = chunk_bytes(chunks, subset->place);
  operation_round(operation);
  operation_copy(operation, out + chunk_offset(chunks, subset->place), own, bytes);
  for (int32_t i = 1; i < subset->size; i++)
    operation_send(operation, subset_member(subset, other(subset, i)), own, bytes);
  for (int32_t i = 1; i < subset->size; i++) {
    int32_t place = other(subset, i);
    operation_receive(operation, subset_member(subset, place), out + chunk_offset(chunks, place),
                      chunk_bytes(chunks, place));
  }
}

void direct_all_to_all(struct operation *operation, uint64_t bytes, const char *in, char *out) {
  const mlxdist_group *group = operation_group(operation);
  uint64_t own = bytes * (uint64_t)group->rank;
  operation_round(operation);
  operation_copy(operation, out + own, in + own, bytes);
  for (int32_t i = 1; i < group->size; i++) {
    int32_t to = (group->rank + i) % group->size, from = (group->rank - i + group->size) % group->size;
    operation_send(operation, to, in + bytes * (uint64_t)to, bytes);
    operation_receive(operation, from, out + bytes * (uint64_t)from, bytes);
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
    operation_send(operation, other(&group->everyone, i), 0, 0);
    operation_receive(operation, other(&group->everyone, i), 0, 0);
  }
}
