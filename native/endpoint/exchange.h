/*
 * An exchange: streams to and from peers that go on at the same time. Every operation is one or two of them.
 *
 * What arrives is either copied to its place, or folded: a fold waits for the same piece from every peer
 * and reduces them where they landed, in rank order, together with this rank's own. So each rank computes
 * the same bits, a sum is rounded once, and no received byte is copied before it is reduced.
 */
#ifndef MLXDIST_ENDPOINT_EXCHANGE_H
#define MLXDIST_ENDPOINT_EXCHANGE_H

#include "group.h"
#include "layout.h"

struct stream {
  struct peer *peer;
  char *data; /* where the bytes come from or go to; unused in a fold */
  uint64_t bytes;
  uint64_t moved;
  bool started; /* its first message has been sent or checked */
};

/* Reduces `count` elements of `sources` sources into `out`, which may be one of them. */
typedef void (*fold_kernel)(void *out, const void *const *sources, int sources_count, uint64_t count);

struct fold {
  fold_kernel kernel;
  uint32_t element_bytes;
  const char *own;
  char *out;
  uint64_t done;
  bool in_place; /* `out` is what is being sent: a piece may be overwritten only when it is on its way */
};

struct exchange {
  mlxdist_group *group;
  struct wire_descriptor sends, receives; /* the same, but for sendrecv of different arrays */
  struct stream *out, *in;
  int outs, ins;
  struct fold *fold; /* NULL: what arrives is copied */
};

int exchange_run(struct exchange *exchange);

#endif
