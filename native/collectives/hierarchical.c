#include "hierarchical.h"

#include "direct.h"

/* The member of a host at a place there. */
static inline int32_t member_at(const mlxdist_group *group, int32_t host, int32_t place) {
  return group->by_host[(ptrdiff_t)host * group->of_host.size + place];
}

void hierarchical_all_reduce(struct operation *operation, const struct reduction *reduction, const char *in,
                             char *out) {
  const mlxdist_group *group = operation_group(operation);
  const struct subset *within = &group->of_host, *between = &group->across_hosts;
  struct reduction of_host = *reduction, part = *reduction;
  of_host.chunks.size = within->size;
  char *own = out + chunk_offset(&of_host.chunks, within->place);
  part.bytes = chunk_bytes(&of_host.chunks, within->place);
  part.chunks.count = part.bytes / part.chunks.element_bytes;
  part.chunks.size = between->size;

  direct_reduce_scatter(operation, within, &of_host, in, own);
  if (between->size == 2) { /* in one round, and with no more bytes */
    direct_all_reduce(operation, between, &part, own, own);
  } else {
    char *own_part = own + chunk_offset(&part.chunks, between->place);
    direct_reduce_scatter(operation, between, &part, own, own_part);
    direct_all_gather(operation, between, &part.chunks, own_part, own);
  }
  direct_all_gather(operation, within, &of_host.chunks, own, out);
}

/* The sum, over this host, of the chunk of the member of `host` at this rank's place. */
static void reduce_for_host(struct operation *operation, const struct reduction *reduction, const char *in,
                            int32_t host, char *sum) {
  const mlxdist_group *group = operation_group(operation);
  const struct subset *within = &group->of_host;
  const char *own = in + chunk_offset(&reduction->chunks, member_at(group, host, within->place));
  operation_round(operation);
  for (int32_t place = 0; place < within->size; place++) {
    if (place == within->place) continue;
    int32_t owner = member_at(group, host, place);
    operation_send(operation, subset_member(within, place), in + chunk_offset(&reduction->chunks, owner),
                   chunk_bytes(&reduction->chunks, owner));
    operation_receive(operation, subset_member(within, place), 0, chunk_max_bytes(&reduction->chunks));
  }
  reduction_add(operation, reduction, own, within->place, sum, false);
}

void hierarchical_reduce_scatter(struct operation *operation, const struct reduction *reduction, const char *in,
                                 char *out) {
  const struct subset *between = &operation_group(operation)->across_hosts;
  struct reduction sums = *reduction; /* one for each host, of equal sizes */
  uint64_t bytes = chunk_max_bytes(&reduction->chunks);
  sums.bytes = bytes * (uint64_t)between->size;
  sums.chunks.count = sums.bytes / sums.chunks.element_bytes;
  sums.chunks.size = between->size;
  char *scratch = operation_scratch(operation, sums.bytes);
  for (int32_t host = 0; host < between->size; host++)
    reduce_for_host(operation, reduction, in, host, scratch + bytes * (uint64_t)host);
  direct_reduce_scatter(operation, between, &sums, scratch, out);
}

void hierarchical_all_gather(struct operation *operation, const struct chunks *chunks, const char *own, char *out) {
  const mlxdist_group *group = operation_group(operation);
  const struct subset *within = &group->of_host, *between = &group->across_hosts;
  uint64_t bytes = chunk_bytes(chunks, group->rank);
  operation_round(operation);
  operation_copy(operation, out + chunk_offset(chunks, group->rank), own, bytes);
  for (int32_t i = 1; i < between->size; i++) {
    int32_t member = subset_member(between, (between->place + i) % between->size);
    operation_send(operation, member, own, bytes);
    operation_receive(operation, member, out + chunk_offset(chunks, member), bytes);
  }
  operation_round(operation);
  for (int32_t i = 1; i < within->size; i++) {
    int32_t place = (within->place + i) % within->size, member = subset_member(within, place);
    for (int32_t host = 0; host < between->size; host++) {
      operation_send(operation, member, out + chunk_offset(chunks, member_at(group, host, within->place)), bytes);
      operation_receive(operation, member, out + chunk_offset(chunks, member_at(group, host, place)), bytes);
    }
  }
}

/* The chunks for `host`, or from it, in scratch: one for each place there. */
static inline char *chunks_of_host(const mlxdist_group *group, char *scratch, uint64_t bytes, int32_t host) {
  return scratch + bytes * (uint64_t)(host * group->of_host.size);
}

/* Collects all of this host's chunks for the members at this rank's place: those for other hosts in `gathered`. */
static void gather_for_hosts(struct operation *operation, uint64_t bytes, const char *in, char *gathered, char *out) {
  const mlxdist_group *group = operation_group(operation);
  const struct subset *within = &group->of_host, *between = &group->across_hosts;
  for (int32_t host = 0; host < between->size; host++) {
    uint64_t own = bytes * (uint64_t)member_at(group, host, within->place);
    char *to = chunks_of_host(group, gathered, bytes, host) + bytes * (uint64_t)within->place;
    operation_round(operation);
    operation_copy(operation, host == between->place ? out + own : to, in + own, bytes);
  }
  for (int32_t i = 1; i < within->size; i++) {
    int32_t place = (within->place + i) % within->size, member = subset_member(within, place);
    for (int32_t host = 0; host < between->size; host++) {
      char *from = chunks_of_host(group, gathered, bytes, host) + bytes * (uint64_t)place;
      operation_send(operation, member, in + bytes * (uint64_t)member_at(group, host, place), bytes);
      operation_receive(operation, member, host == between->place ? out + bytes * (uint64_t)member : from, bytes);
    }
  }
}

void hierarchical_all_to_all(struct operation *operation, uint64_t bytes, const char *in, char *out) {
  const mlxdist_group *group = operation_group(operation);
  const struct subset *within = &group->of_host, *between = &group->across_hosts;
  uint64_t of_host = bytes * (uint64_t)within->size, of_group = bytes * (uint64_t)group->size;
  char *gathered = operation_scratch(operation, 2 * of_group), *arrived = gathered + of_group;
  gather_for_hosts(operation, bytes, in, gathered, out);
  operation_round(operation);
  for (int32_t i = 1; i < between->size; i++) {
    int32_t host = (between->place + i) % between->size, member = subset_member(between, host);
    operation_send(operation, member, chunks_of_host(group, gathered, bytes, host), of_host);
    operation_receive(operation, member, chunks_of_host(group, arrived, bytes, host), of_host);
  }
  for (int32_t i = 1; i < between->size; i++) {
    int32_t host = (between->place + i) % between->size;
    for (int32_t place = 0; place < within->size; place++) {
      operation_round(operation);
      operation_copy(operation, out + bytes * (uint64_t)member_at(group, host, place),
                     chunks_of_host(group, arrived, bytes, host) + bytes * (uint64_t)place, bytes);
    }
  }
}
