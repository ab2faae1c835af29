/*
 * An operation: what a collective does, written down before it begins.
 *
 * It is a schedule of *rounds*. In a round, transfers to and from some members of the group go on at the same time, and
 * the next round begins when all of them have ended. What arrives is copied to its place, or reduced: the same piece
 * of every transfer is reduced where it landed, together with this rank's own. Every collective, whatever its
 * algorithm, is such a schedule; transfer.c carries it out, together with those of all other groups.
 *
 * A round that only copies is allowed, and all that there is in a group of one.
 */
#pragma once

#include "layout.h"
#include "transfer.h"

#include <stdbool.h>

/* Reduces `count` elements of `sources` sources into `out`, which may be one of them. */
typedef void (*reduce_function)(void* out, const void* const* sources, int sources_count, uint64_t count);

struct reduce_step {
  reduce_function kernel;
  uint32_t element_bytes;
  const char* own;  /* reduced with what arrives from the transfers of the round, in the order of these */
  int own_position; /* transfers that come before it */
  char* out;
  bool in_place; /* `out` is what is being sent: a piece may be overwritten only when it need not leave any more */
  uint64_t done;
};

struct round {
  int first_out, outs, first_in, ins; /* in the operation's transfers */
  bool begun, reduces;
  struct reduce_step reduce;
  void* copy_to;
  const void* copy_from;
  uint64_t copy_bytes;
};

struct operation {
  mlxdist_group* group;
  struct wire_descriptor sends, receives; /* the same, but for sendrecv of different arrays */
  struct round* rounds;
  int round_count, rounds_capacity, current;
  struct transfers {
    struct transfer* list;
    int count, capacity;
  } out, in; /* of all rounds */
  void* scratch;
  int status;   /* MLXDIST_OK; while it is written, why it cannot be */
  bool handled; /* the program has a handle */
  bool lazy;    /* a thread of MLX carries it out */
  _Atomic int ended;
  atomic_int owners;      /* the engine and the handle */
  struct operation* next; /* in progress */
  uint64_t number;        /* among all operations of this rank, from 1 */
  uint64_t started_ns;
  char call_site[FLIGHT_CALL_SITE_BYTES];
  uint32_t progress_count, seen_progress; /* of the deadline: how often it got on */
  uint64_t stuck_since_ns, repeat_cts_at_ns, repeat_cts_after_ns;
  double timeout;         /* in seconds; negative: that of the engine */
  double stall_warned_at; /* seconds without progress at which it is noted next */
  uint64_t sequence;      /* among the collectives of its group, or among the messages; from 1 */
  uint64_t label;
  uint32_t place, send_place, receive_place; /* of a collective; of a message to and from its peers (places.h) */
};

static inline const mlxdist_group* operation_group(const struct operation* operation) { return operation->group; }

/* The others are between two ranks. */
static inline bool operation_is_collective(const struct operation* operation) {
  return operation->sends.operation != WIRE_SEND;
}

/* A new operation. */
int operation_new(mlxdist_group* group, const struct wire_descriptor* descriptor, struct operation** operation);

/* What arrives is described in another way than what leaves. */
static inline void operation_expect(struct operation* operation, const struct wire_descriptor* receives) {
  operation->receives = *receives;
}

/* A new round, after those that there are; what follows is added to it. */
void operation_round(struct operation* operation);
void operation_send(struct operation* operation, int32_t member, const void* data, uint64_t bytes);
void operation_receive(struct operation* operation, int32_t member, void* data, uint64_t bytes); /* NULL: reduced */
void operation_copy(struct operation* operation, void* to, const void* from, uint64_t bytes);    /* when it begins */

static inline void operation_reduce(struct operation* operation, struct reduce_step step) {
  if (operation->status) return;
  operation->rounds[operation->round_count - 1].reduces = true;
  operation->rounds[operation->round_count - 1].reduce = step;
}

/* Memory for partial results, freed with the operation. NULL if there is none: operation_start will say so. */
char* operation_scratch(struct operation* operation, uint64_t bytes);

/* Whether the member has come to it, as its messages or its clear to send show. */
static inline bool operation_has_entered(const struct operation* operation, const struct group_peer* group_peer) {
  for (int i = 0; i < operation->in.count; i++) {
    const struct transfer* transfer = &operation->in.list[i];
    if (transfer->group_peer == group_peer && (transfer->started || transfer->arrived)) return true;
  }
  for (int i = 0; i < operation->out.count; i++) {
    const struct transfer* transfer = &operation->out.list[i];
    if (transfer->group_peer == group_peer && transfer->cleared) return true;
  }
  return false;
}

/* Whether the peer is known to receive the transfer. A member that has sent something of a collective has issued all of
 * it. */
static inline bool transfer_is_cleared(const struct transfer* transfer) {
  return transfer->cleared || (operation_is_collective(transfer->operation) &&
                               operation_has_entered(transfer->operation, transfer->group_peer));
}

/* Before it is issued: the places, the label and the deadline of the call, or new ones where it has none. */
void operation_place(struct operation* operation, const mlxdist_call* call);

/* With the lock: it is in progress from now on, and its transfers are known by its place. */
int operation_issue(struct operation* operation);

/* With the lock: it is over, well or not. */
void operation_end(struct operation* operation, int status);

/* With release: who reads `ended` sees its results. It may be freed at once by another thread. */
static inline void operation_mark_ended(struct operation* operation) {
  atomic_store_explicit(&operation->ended, 1, memory_order_release);
}

/* Before any other thread knows it. */
static inline void operation_set_owners(struct operation* operation, int owners) {
  atomic_store_explicit(&operation->owners, owners, memory_order_relaxed);
}

/* One owner less; the last one frees it. */
void operation_release(struct operation* operation);

/* It is kept for the next one of its group to use. */
void operation_recycle(struct operation* operation);
void operation_destroy(struct operation* operation);
