/*
 * A channel: one UC queue pair to one peer with its slots, sequence numbers, credits and acknowledgements.
 *
 * UC keeps order but not delivery: a SEND that meets no posted receive vanishes, and the sender still
 * completes. So a message is sent only when the peer is known to have a receive posted for it (credit),
 * its slot is kept until the peer has said that it arrived (acknowledgement), and its sequence number
 * tells the receiver when one is missing: it then drops what follows and asks for the rest again (go-back-N).
 *
 * Every receive slot is either posted or holds an arrived message, always: outstanding + held = slots.
 */
#ifndef MLXDIST_ENDPOINT_CHANNEL_H
#define MLXDIST_ENDPOINT_CHANNEL_H

#include "device.h"
#include "wire.h"

struct engine;
struct group_counters;
struct link;
struct peer;

#define CHANNEL_EAGER_BYTES 4096u

/* The first message of a stream needs room for header and descriptor. The others leave the descriptor's
 * place unused, so that all pieces of a stream have the same size on every rank. */
#define CHANNEL_OVERHEAD (sizeof(struct wire_header) + sizeof(struct wire_descriptor))

/* Eager receives that data may not use: acknowledgements and an abort must get through when data that nobody has
 * asked for yet fills all others. */
#define CHANNEL_CONTROL_SLOTS 2u

/* Buffers for acknowledgements on the eager channel, which are not kept. */
#define CHANNEL_CONTROL_BUFFERS 4u

/* So many bytes of messages that nobody takes are kept on the heap, then they stay in their slots. */
#define CHANNEL_MOST_SPILLED (256ull << 20)

/* A message that has arrived. Lives with its slot, or on the heap when it had to make room there. */
struct arrival {
  struct channel* channel;
  char* bytes; /* header, descriptor if it is the first of its stream, payload */
  bool on_heap;
  bool posted;          /* its slot is the device's */
  struct arrival* next; /* of the same stream, or among those that nobody has asked for yet */
};

/* What stands in a send slot, and behind it in the user's memory. */
struct kept_message {
  uint32_t length;  /* bytes in the slot */
  const char* user; /* payload that was not copied into the slot, or NULL */
  uint32_t user_length, user_lkey;
};

struct channel {
  struct engine* engine;
  struct peer* peer;
  const struct link* link;
  struct device* device; /* of the link */
  struct ibv_qp* qp;
  uint32_t epoch;   /* so many queue pairs before this one have failed */
  bool connected;   /* it can send and receive, and receives are posted, */
  bool answered;    /* and so it is on the peer's side: */
  bool open;        /* messages may leave */
  uint32_t repairs; /* queue pairs in a row that have failed before they carried anything */
  uint32_t lkey;
  uint32_t index; /* 2 * link + enum wire_channel */
  uint32_t slot_bytes, slots, reserve;
  char *send_slots, *receive_slots, *control;
  struct kept_message* kept; /* of each send slot */
  struct arrival* arrivals;  /* of each receive slot */

  uint32_t sent;                                      /* sequence of the last message sent */
  uint32_t send_slot;                                 /* for the next one */
  uint32_t acked;                                     /* of the last one that the peer has */
  uint32_t credit;                                    /* highest one that the peer has a receive for */
  uint32_t requests;                                  /* work requests posted, acknowledgements and repetitions too */
  uint32_t completed;                                 /* of those known to have left the send queue */
  uint32_t repeated;                                  /* the last of them that was a repetition */
  uint32_t control_requests[CHANNEL_CONTROL_BUFFERS]; /* the last to use each buffer */

  uint32_t received;              /* sequence of the last message that arrived in order */
  uint32_t outstanding;           /* receives posted now */
  uint32_t told_ack, told_credit; /* what the peer was told last */
  uint64_t spilled_bytes;         /* of arrived messages on the heap */
  bool wants_resend;              /* a message is missing, and the peer must be told */
  uint32_t asked_after;           /* `received` when it was told last */
  bool must_tell;                 /* the peer seems not to know what it should */

  /* Of the timers, which look now and then instead of noting the time of every message. */
  uint32_t seen_acked, seen_received;
  uint64_t unacked_since_ns, untold_since_ns, patience_ns;
  uint32_t repeats; /* in a row, with no acknowledgement */
  uint32_t seen_requests;
  uint64_t quiet_since_ns;
  bool rested; /* so long that the port is looked at before the next message */
};

/* What to send. The payload is copied into the slot, or, with `user_lkey`, read where it is until acknowledged. */
struct outgoing_message {
  enum wire_kind kind;
  uint8_t flags;
  uint16_t group;
  uint32_t stream, ready, order;
  uint64_t offset;
  const struct wire_descriptor* descriptor; /* NULL but for the first message of a stream */
  const void* payload;
  uint32_t length;
  uint32_t user_lkey;
  struct group_counters* counters; /* of the group, NULL for control messages */
};

/* Creates the queue pair over slots at `memory`, channel_memory_bytes in all, which lie in the link's slab. */
int channel_create(struct channel* channel, struct engine* engine, struct peer* peer, const struct link* link,
                   uint32_t index, char* memory);
void channel_destroy(struct channel* channel);
uint64_t channel_memory_bytes(const struct engine* engine, enum wire_channel kind);

/* When it is in RTS (queue_pair.h): posts every receive slot. */
int channel_post_all(struct channel* channel);

/* A new queue pair in the place of one that failed, not connected yet. */
int channel_reopen(struct channel* channel, uint32_t epoch);

/* Receives that data may use. */
uint32_t channel_room(const struct channel* channel);

/* "eager" or "bulk" */
const char* channel_name(const struct channel* channel);
int channel_post_receive(struct channel* channel, uint32_t slot);

/* TRANSPORT, for a verb that has failed. */
int channel_fail_verb(const struct channel* channel, const char* verb, int error);

bool channel_can_send(const struct channel* channel, enum wire_kind kind);
int channel_send(struct channel* channel, const struct outgoing_message* message);

/* Sends an acknowledgement with all that the peer should know, if it can. On eager channels; on the others as a sign of
 * life (keepalive.h). */
int channel_acknowledge(struct channel* channel, uint16_t group, uint32_t ready, uint8_t flags, bool* sent);

/* Whether all repetitions have left the send queue. An acknowledgement says only that a message has left once: while
 * its repetition waits there, the slot and the user's memory that it is read from must stay as they are. */
bool channel_is_clear(const struct channel* channel);

/* Whether all messages are acknowledged, and yet completions are missing without which no other can leave, or no
 * acknowledgement. */
bool channel_lacks_completions(const struct channel* channel);

/* The slot of the first message that is not acknowledged; where all are, of the next one. */
uint32_t channel_oldest_slot(const struct channel* channel);

/* Whether a message may have to leave again from user memory within these bytes. */
bool channel_keeps(const struct channel* channel, const char* data, uint64_t bytes);

/* Sends everything again that has not been acknowledged, unless the last repetition has yet to leave. */
int channel_resend(struct channel* channel);

/* Sends the message in a slot of `channel` by another one, which must have room, and marks it as repeated. */
int channel_forward(const struct channel* channel, uint32_t slot, struct channel* by);

/* Gives the slot of an arrived message back to the peer, or its memory to the system. */
int channel_release(struct arrival* arrival);

/* Copies an arrived message out of its slot, which is then the peer's again. */
int channel_spill(struct arrival** arrival);

/* Whether messages that have arrived take up so many slots that others could not get past. */
bool channel_is_crowded(const struct channel* channel);

/* Called by the engine for each completion. `arrival` is set to a data message to be delivered. */
void channel_on_sent(struct channel* channel, uint32_t request);
int channel_on_received(struct channel* channel, uint32_t slot, uint32_t byte_len, struct arrival** arrival);

/* The peer has said what it has received, and has receives for. The queue pairs are not ordered with each other, so
 * this may be older than what is known. */
void channel_hear(struct channel* channel, uint32_t received, uint32_t receives);

/* Whether the peer waits for news: `lazily` leaves more of the window open in the hope of a ride. */
bool channel_owes_news(const struct channel* channel, bool lazily);

static inline struct wire_header* arrival_header(const struct arrival* arrival) {
  return (struct wire_header*)arrival->bytes;
}
static inline const struct wire_descriptor* arrival_descriptor(const struct arrival* arrival) {
  bool first = arrival_header(arrival)->flags & WIRE_FIRST;
  return first ? (const struct wire_descriptor*)(arrival->bytes + sizeof(struct wire_header)) : 0;
}
static inline const char* arrival_payload(const struct arrival* arrival) {
  bool first = arrival_header(arrival)->flags & WIRE_FIRST;
  return arrival->bytes + sizeof(struct wire_header) + (first ? sizeof(struct wire_descriptor) : 0);
}

#endif
