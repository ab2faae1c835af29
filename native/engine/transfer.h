/*
 * A transfer: bytes from one member of a group to another within one operation. They leave as messages of at
 * most one slot; the first carries the descriptor of the operation.
 */
#pragma once

#include "group.h"

struct operation;

struct transfer {
  struct operation* operation;
  struct group_peer* group_peer;
  char* data; /* where the bytes come from or go to; NULL where they are reduced */
  uint64_t bytes;
  uint64_t done;
  uint32_t place; /* of its operation, */
  uint16_t index; /* and its own among those of the operation between these ranks; WIRE_MESSAGE: of a message */
  bool started;   /* its first message has been sent or checked */
  bool cleared;   /* of one that sends: the peer has said that it receives it */

  /* Of one that receives. */
  struct recv_desc *arrived, *arrived_last; /* by offset */
  struct transfer* next;                    /* that expects messages from the same peer */

  /* Of one that sends. */
  mlxdist_region* region;                   /* registered memory that `data` lies in, or NULL */
  uint32_t last_from_region[WIRE_CHANNELS]; /* last message that left from there, of the channels in */
  uint32_t from_region;                     /* this mask */
};

/* Bytes that may be sent to a rank that is not known to receive them: they wait there in slots, or on the heap. */
static inline uint64_t transfer_eager_limit(const struct engine* engine) {
  return 2 * (uint64_t)engine->options.bulk_slot_bytes;
}

static inline bool transfer_is_done(const struct transfer* transfer) {
  return transfer->started && transfer->done == transfer->bytes;
}

/* What left from the user's memory may have to leave again: it has to stay as it is until it is acknowledged, and has
 * left as often as it was sent. */
static inline bool transfer_is_acked(const struct transfer* transfer) {
  for (uint32_t i = 0; transfer->from_region >> i; i++) {
    const struct channel* channel = &transfer->group_peer->peer->endpoint.channels[i];
    bool here = transfer->from_region >> i & 1;
    if (here && !(wire_at_least(channel->acked, transfer->last_from_region[i]) && channel_is_clear(channel)))
      return false;
  }
  return true;
}
static inline bool transfer_is_sent(const struct transfer* transfer) {
  return transfer_is_done(transfer) && (!transfer->from_region || transfer_is_acked(transfer));
}

/* By which two ranks know it, within a group. */
static inline uint64_t transfer_name(const struct transfer* transfer) {
  return (uint64_t)transfer->place << 16 | transfer->index;
}

/* With the lock: the operation gets on as far as it can, the transfers of its rounds piece by piece. */
int operation_step(struct operation* operation, bool* progressed);
