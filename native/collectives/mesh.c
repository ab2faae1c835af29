#include "mesh.h"

/* The i-th other member, beginning with the next one: if all began with rank 0, they would queue up there. */
static int32_t other(const mlxdist_group *group, int32_t i) { return (group->rank + i) % group->size; }

/* In rank order, which is the order of the reduction. */
static void receive_from_all(struct operation *operation, uint64_t bytes) {
  const mlxdist_group *group = operation_group(operation);
  for (int32_t member = 0; member < group->size; member++)
    if (member != group->rank) operation_receive(operation, member, 0, bytes);
}

void mesh_reduce_all(struct operation *operation, const struct reduction *reduction, const char *in, char *out) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  for (int32_t i = 1; i < group->size; i++) operation_send(operation, other(group, i), in, reduction->bytes);
  receive_from_all(operation, reduction->bytes);
  operation_fold(operation, (struct fold){.kernel = reduction->kernel,
                                          .element_bytes = reduction->parts.element_bytes,
                                          .own = in,
                                          .own_place = group->rank,
                                          .out = out,
                                          .in_place = in == out});
}

void mesh_reduce_parts(struct operation *operation, const struct reduction *reduction, const char *in, char *out) {
  const struct parts *parts = &reduction->parts;
  const mlxdist_group *group = operation_group(operation);
  const char *own = in + part_offset(parts, group->rank);
  operation_round(operation);
  for (int32_t i = 1; i < group->size; i++) {
    int32_t member = other(group, i);
    operation_send(operation, member, in + part_offset(parts, member), part_bytes(parts, member));
  }
  receive_from_all(operation, part_bytes(parts, group->rank));
  operation_fold(operation, (struct fold){.kernel = reduction->kernel,
                                          .element_bytes = parts->element_bytes,
                                          .own = own,
                                          .own_place = group->rank,
                                          .out = out,
                                          /* Its own part nobody else reads; elsewhere in `in` lie those of others. */
                                          .in_place = out >= in && out < in + reduction->bytes && out != own});
}

void mesh_gather_parts(struct operation *operation, const struct parts *parts, const char *own, char *out) {
  const mlxdist_group *group = operation_group(operation);
  uint64_t bytes = part_bytes(parts, group->rank);
  operation_round(operation);
  operation_copy(operation, out + part_offset(parts, group->rank), own, bytes);
  for (int32_t i = 1; i < group->size; i++) operation_send(operation, other(group, i), own, bytes);
  for (int32_t i = 1; i < group->size; i++) {
    int32_t member = other(group, i);
    operation_receive(operation, member, out + part_offset(parts, member), part_bytes(parts, member));
  }
}

void mesh_meet(struct operation *operation) {
  const mlxdist_group *group = operation_group(operation);
  operation_round(operation);
  for (int32_t i = 1; i < group->size; i++) {
    operation_send(operation, other(group, i), 0, 0);
    operation_receive(operation, other(group, i), 0, 0);
  }
}
