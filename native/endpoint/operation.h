/*
 * An operation: what a collective does, written down before it begins.
 *
 * It is a list of *rounds*. In a round, streams to and from some members of the group go on at the same time, and
 * the next round begins when all of them have ended. What arrives is copied to its place, or folded: the same piece
 * of every stream is reduced where it landed, together with this rank's own. Every collective, whatever its
 * algorithm, is such a list; the engine carries it out in exchange.c, together with those of all other groups.
 *
 * A round that only copies is allowed, and all that there is in a group of one.
 */
#ifndef MLXDIST_ENDPOINT_OPERATION_H
#define MLXDIST_ENDPOINT_OPERATION_H

#include "layout.h"
#include "stream.h"

#include <stdbool.h>

/* Reduces `count` elements of `sources` sources into `out`, which may be one of them. */
typedef void (*fold_kernel)(void* out, const void* const* sources, int sources_count, uint64_t count);

struct fold {
  fold_kernel kernel;
  uint32_t element_bytes;
  const char* own; /* reduced with what arrives from the streams of the round, in the order of these */
  int own_place;   /* so many of them come before it */
  char* out;
  bool in_place; /* `out` is what is being sent: a piece may be overwritten only when nobody needs it any more */
  uint64_t done;
};

struct operation;
const mlxdist_group* operation_group(const struct operation* operation);

/* A new operation. Fails, with the reason given, if the group is finalized, not connected, or has failed. */
int operation_new(mlxdist_group* group, const struct wire_descriptor* descriptor, struct operation** operation);

/* A new round, after those that there are; what follows is added to it. */
void operation_round(struct operation* operation);
void operation_send(struct operation* operation, int32_t member, const void* data, uint64_t bytes);
void operation_receive(struct operation* operation, int32_t member, void* data, uint64_t bytes); /* NULL: folded */
void operation_copy(struct operation* operation, void* to, const void* from, uint64_t bytes);    /* when it begins */
void operation_fold(struct operation* operation, struct fold fold);

/* Memory for partial results, freed with the operation. NULL if there is none: operation_start will say so. */
char* operation_scratch(struct operation* operation, uint64_t bytes);

/* What sendrecv receives may differ from what it sends. */
void operation_receives(struct operation* operation, const struct wire_descriptor* descriptor);

/* Starts the operation: all its streams get their numbers now. Without `handle` waits until it has ended. */
int operation_start(struct operation* operation, mlxdist_handle** handle);

struct round {
  int first_out, outs, first_in, ins; /* in the operation's streams */
  bool begun, folds;
  struct fold fold;
  void* copy_to;
  const void* copy_from;
  uint64_t copy_bytes;
};

struct operation {
  mlxdist_group* group;
  struct wire_descriptor sends, receives; /* the same, but for sendrecv of different arrays */
  struct round* rounds;
  int round_count, rounds_room, current;
  struct streams {
    struct stream* list;
    int count, room;
  } out, in; /* of all rounds */
  void* scratch;
  int status;   /* MLXDIST_OK; while it is written, why it cannot be */
  bool handled; /* somebody has a handle, */
  bool ordered; /* or its place among the collectives of the group counts */
  bool lazy;    /* a thread of MLX carries it out */
  _Atomic int ended;
  atomic_int owners;      /* the engine and the handle */
  struct operation* next; /* in progress */
  uint64_t number;        /* among all operations of this rank, from 1 */
  uint64_t started_ns;
  char place[FLIGHT_PLACE_BYTES]; /* in the program */
  uint32_t moves, seen_moves;     /* of the deadline: how often it got on */
  uint64_t stuck_since_ns, tell_at_ns, tell_after_ns;
  double timeout;    /* in seconds; negative: that of the engine */
  double noticed_at; /* seconds of standing still at which it is noted next */
  uint64_t sequence; /* among the collectives of its group, or among the messages; from 1 */
};

/* Frees one that was never started. */
void operation_destroy(struct operation* operation);

/* With the lock: gets on as far as it can. */
int operation_step(struct operation* operation, bool* moved);

/* With the lock: it is over, well or not. Wakes the threads that wait for it. */
void operation_end(struct operation* operation, int status);

/* Whether it is a collective: the others are between two ranks. */
bool operation_is_collective(const struct operation* operation);

/* The rank of the world that it waits for, -1 if for none in particular, and whether anything of this operation has
 * come from it. `stream` is the one that it waits for: of those to the rank or, if `receives`, from it. */
struct lateness {
  int32_t rank;
  bool entered, receives;
  bool needs_entry; /* it cannot go on before the rank has issued the stream */
  uint32_t stream;
};
struct lateness operation_late(const struct operation* operation);

#endif
