#include "ring.h"

/* Large enough for several messages, small enough that the last rank does not wait long for the first. */
#define PIECE_BYTES (512u << 10)

struct ring_position {
  const mlxdist_group *group;
  int32_t position, size;
};

static struct ring_position position_of(const struct operation *operation) {
  const mlxdist_group *group = operation_group(operation);
  struct ring_position at = {.group = group, .size = group->size};
  while (group->ring[at.position] != group->rank) at.position++;
  return at;
}

/* The rank `steps` behind this one in the ring. */
static int32_t behind(const struct ring_position *at, int32_t steps) {
  return at->group->ring[((at->position - steps) % at->size + at->size) % at->size];
}

void ring_reduce_scatter(struct operation *operation, const struct reduction *reduction, const char *in, char *partial,
                         char *out) {
  const struct chunks *chunks = &reduction->chunks;
  struct ring_position at = position_of(operation);
  uint64_t most = chunk_max_bytes(chunks);
  /* Two partial results at a time: the one that leaves and the one that is computed. */
  char *scratch = partial || at.size == 2 ? 0 : operation_scratch(operation, 2 * most);
  const char *leaving = in + chunk_offset(chunks, behind(&at, 1));
  for (int32_t step = 0; step < at.size - 1; step++) {
    int32_t sent = behind(&at, 1 + step), received = behind(&at, 2 + step);
    bool last = step == at.size - 2;
    char *result = last ? out : partial ? partial + chunk_offset(chunks, received) : scratch + (step & 1) * most;
    operation_round(operation);
    operation_send(operation, behind(&at, -1), leaving, chunk_bytes(chunks, sent));
    operation_receive(operation, behind(&at, 1), 0, chunk_bytes(chunks, received));
    reduction_add(operation, reduction, in + chunk_offset(chunks, received), 1, result, result == leaving);
    leaving = result;
  }
}

void ring_all_gather(struct operation *operation, const struct chunks *chunks, const char *own, char *out) {
  struct ring_position at = position_of(operation);
  const char *leaving = own;
  for (int32_t step = 0; step < at.size - 1; step++) {
    int32_t sent = behind(&at, step), received = behind(&at, step + 1);
    operation_round(operation);
    if (step == 0) operation_copy(operation, out + chunk_offset(chunks, sent), own, chunk_bytes(chunks, sent));
    operation_send(operation, behind(&at, -1), leaving, chunk_bytes(chunks, sent));
    leaving = out + chunk_offset(chunks, received);
    operation_receive(operation, behind(&at, 1), out + chunk_offset(chunks, received), chunk_bytes(chunks, received));
  }
}

void ring_broadcast(struct operation *operation, char *data, uint64_t bytes, int32_t root) {
  struct ring_position at = position_of(operation);
  bool first = at.group->rank == root, last = behind(&at, -1) == root;
  uint64_t pieces = bytes / PIECE_BYTES + 1;
  for (uint64_t i = 0; i < pieces + !first; i++) {
    uint64_t leaving = first ? i : i - 1, begin = leaving * PIECE_BYTES;
    operation_round(operation);
    if (!last && leaving < pieces)
      operation_send(operation, behind(&at, -1), data + begin,
                     bytes - begin < PIECE_BYTES ? bytes - begin : PIECE_BYTES);
    begin = i * PIECE_BYTES;
    if (!first && i < pieces)
      operation_receive(operation, behind(&at, 1), data + begin,
                        bytes - begin < PIECE_BYTES ? bytes - begin : PIECE_BYTES);
  }
}

void ring_barrier(struct operation *operation) {
  struct ring_position at = position_of(operation);
  for (int32_t step = 0; step < at.size - 1; step++) {
    operation_round(operation);
    operation_send(operation, behind(&at, -1), 0, 0);
    operation_receive(operation, behind(&at, 1), 0, 0);
  }
}
