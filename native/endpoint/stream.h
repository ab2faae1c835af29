/*
 * A stream: one transfer from one member of a group to another within one operation. It is cut into messages of at
 * most one slot; the first carries the descriptor of the operation.
 */
#ifndef MLXDIST_ENDPOINT_STREAM_H
#define MLXDIST_ENDPOINT_STREAM_H

#include "group.h"

struct operation;
struct region;

struct stream {
  struct operation* operation;
  struct lane* lane;
  char* data; /* where the bytes come from or go to; NULL in a fold */
  uint64_t bytes;
  uint64_t moved;
  uint32_t number;
  uint32_t order; /* of its operation among the collectives of the group, if it is ordered */
  bool started;   /* its first message has been sent or checked */

  /* Of one that receives. */
  struct arrival *arrived, *arrived_last; /* by offset */
  struct stream* next;                    /* that expects messages from the same peer */

  /* Of one that sends. */
  mlxdist_region* region;              /* registered memory that `data` lies in, or NULL */
  uint32_t unconfirmed[WIRE_CHANNELS]; /* last message that left from there, of the channels in */
  uint32_t from_region;                /* this mask */
};

/* So many bytes may be sent to a rank that is not known to receive them: they wait there in slots, or on the heap. */
static inline uint64_t stream_unasked_bytes(const struct engine* engine) {
  return 2 * (uint64_t)engine->options.bulk_slot_bytes;
}

#endif
