/*
 * The transport: the devices of this process, and an endpoint for each rank that it exchanges messages with. It carries
 * messages in order and without loss over queue pairs that promise neither, and knows nothing of operations.
 *
 * One thread at a time may call it: the owner has the lock. It never waits.
 */
#pragma once

#include "counters.h"
#include "endpoint.h"
#include "mlxdist.h"
#include "mr_cache.h"

/* Called from transport_poll, transport_flush, transport_tick and reconnect_receive. A status that is not MLXDIST_OK
 * ends the call, and comes back through on_error. */
struct transport_callbacks {
  /* A message has arrived, in order: data, which is the owner's until recv_release, or an abort, which is not. */
  int (*on_message)(struct endpoint* endpoint, struct recv_desc* message);
  /* An acknowledgement has arrived, or is about to leave: fields of it that the transport does not read. */
  int (*on_ack)(struct endpoint* endpoint, const struct wire_header* header);
  void (*fill_ack)(struct endpoint* endpoint, struct wire_header* header);
  /* A queue pair has failed and was re-created: a thread without the lock is to call reconnect_next. */
  void (*on_link_down)(struct endpoint* endpoint);
  /* Nothing more will be exchanged. The text is in mlxdist_last_error(). */
  void (*on_error)(struct transport* transport, int status);
};

struct transport {
  int32_t rank, size;
  const char* host;
  mlxdist_options* options;
  struct transport_counters* counters;
  const struct transport_callbacks* callbacks;
  struct endpoint** endpoints; /* by rank; the own one stays empty */
  struct device* devices;      /* all that any endpoint leaves by */
  uint32_t device_count;
  char provider[64]; /* name of their provider, or of all */
  struct mr_cache mr_cache;
  bool ack_pending;              /* of any endpoint, */
  bool degraded;                 /* an endpoint has a dead link */
  bool can_reconnect;            /* there is a side channel */
  atomic_bool keepalive_stopped; /* the last operation has ended */
};

/* Opens the devices that each of `reachable` ranks is reached by: `links` as in the options. Fits the slots of the
 * options to them. The caller has set rank, size, host, options, counters, callbacks and endpoints. */
int transport_open(struct transport* transport, const mlxdist_link* links, const bool* reachable);
void transport_close(struct transport* transport);

/* Takes what has completed. */
void transport_poll(struct transport* transport, bool* progressed);

/* Sends acknowledgements that are due, and what a dead link has left over. */
void transport_flush_pending(struct transport* transport, bool lazily);
static inline void transport_flush(struct transport* transport, bool lazily) {
  if (transport->ack_pending || transport->degraded) transport_flush_pending(transport, lazily);
}

/* The timers of all endpoints. */
void transport_tick(struct transport* transport, uint64_t now_ns);

bool transport_is_settled(const struct transport* transport);

/* The next flush looks at this endpoint. */
static inline void endpoint_mark_ack(struct endpoint* endpoint) {
  endpoint->ack_pending = true;
  endpoint->transport->ack_pending = true;
}

/* There is a side channel, or none any more. */
static inline void transport_set_reconnect(struct transport* transport, bool possible) {
  transport->can_reconnect = possible;
}

/* The last operation has ended. */
static inline void transport_stop_keepalive(struct transport* transport) { transport->keepalive_stopped = true; }

static inline void endpoint_mark_dead(struct endpoint* endpoint, uint32_t link) {
  endpoint->dead_links |= 1u << link;
  endpoint->trials[link] = (struct link_trial){0};
  endpoint->transport->degraded = true;
}
static inline void endpoint_mark_alive(struct endpoint* endpoint, uint32_t link) {
  endpoint->dead_links &= ~(1u << link);
}
