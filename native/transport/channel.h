/*
 * A channel: reliability over one UC queue pair, with its slots, sequence numbers, credits and acknowledgements.
 *
 * UC keeps order but not delivery: a SEND that meets no posted receive vanishes, and the sender still
 * completes. So a message is sent only when the peer is known to have a receive posted for it (credit),
 * its slot is kept until the peer has said that it arrived (acknowledgement), and its sequence number
 * shows the receiver when one is missing: it then discards later messages and requests retransmission (go-back-N).
 *
 * Every receive slot is either posted or holds an arrived message, always: outstanding + held = slots.
 */
#pragma once

#include "device.h"
#include "mlxdist.h"
#include "recv_desc.h"
#include "wire.h"

struct endpoint;
struct link;
struct transport;

#define CHANNEL_EAGER_BYTES 4096u

/* The first message of a transfer needs room for header and descriptor, and for the acknowledgements of further links.
 * The others leave it unused, so that all pieces of a transfer have the same size on every rank. */
#define CHANNEL_OVERHEAD (sizeof(struct wire_header) + sizeof(struct wire_links) + sizeof(struct wire_descriptor))

/* Eager receives that data may not use: acknowledgements and an abort must get through when data that no
 * operation takes yet fills all others. */
#define CHANNEL_CONTROL_SLOTS 2u

/* Buffers for acknowledgements on the eager channel, which are not kept. */
#define CHANNEL_CONTROL_BUFFERS 4u

/* Bytes of messages that no transfer takes which are kept on the heap; more stay in their slots. */
#define CHANNEL_MAX_SPILLED (256ull << 20)

/* What stands in a send slot, and behind it in the user's memory. */
struct kept_message {
  uint32_t length;  /* bytes in the slot */
  const char* user; /* payload that was not copied into the slot, or NULL */
  uint32_t user_length, user_lkey;
};

struct channel {
  struct transport* transport;
  struct endpoint* endpoint;
  int32_t peer; /* rank */
  const struct link* link;
  struct device* device; /* of the link */
  struct ibv_qp* qp;
  uint32_t epoch;      /* queue pairs before this one that have failed */
  bool connected;      /* it can send and receive, and receives are posted, */
  bool answered;       /* and so it is on the peer's side: */
  bool open;           /* messages may leave */
  uint32_t reconnects; /* queue pairs in a row that have failed before they carried anything */
  uint64_t wr_id;      /* of all its work requests, without the number */
  uint32_t lkey;
  uint32_t index; /* 2 * link + enum wire_channel */
  uint32_t slot_bytes, slots, reserve;
  char *send_slots, *receive_slots, *control;
  struct kept_message* kept;    /* of each send slot */
  struct recv_desc* recv_descs; /* of each receive slot */

  uint32_t sent;                                      /* sequence of the last message sent */
  uint32_t send_slot;                                 /* for the next one */
  uint32_t acked;                                     /* of the last one that the peer has */
  uint32_t credit;                                    /* highest one that the peer has a receive for */
  uint32_t requests;                                  /* work requests posted: also acknowledgements, retransmissions */
  uint32_t completed;                                 /* of those known to have left the send queue */
  uint32_t last_retransmit;                           /* the last one that was a retransmission */
  uint32_t control_requests[CHANNEL_CONTROL_BUFFERS]; /* the last to use each buffer */

  uint32_t received;      /* sequence of the last message that arrived in order */
  uint32_t outstanding;   /* receives posted now */
  uint32_t ack_share;     /* messages, or credits, that make an acknowledgement due */
  uint64_t spilled_bytes; /* of arrived messages on the heap */
  uint32_t nak_sent_for;  /* `received` when a retransmission was requested last */

  /* Of the timers, which look now and then instead of noting the time of every message. */
  uint32_t seen_acked, seen_received;
  uint64_t unacked_since_ns, ack_pending_since_ns, rto_ns;
  uint32_t retry_count; /* in a row, with no acknowledgement */
  uint32_t seen_requests;
  uint64_t quiet_since_ns;
  bool idle; /* so long that the port is looked at before the next message */
};

/* What to send. The payload is copied into the slot, or, with `user_lkey`, read where it is until acknowledged. */
struct outgoing_message {
  enum wire_kind kind;
  uint8_t flags;
  uint16_t group, index;
  uint32_t place, cts;
  uint64_t offset, label;
  const struct wire_descriptor* descriptor; /* NULL but for the first message of a transfer */
  const void* payload;
  uint32_t length;
  uint32_t user_lkey;
};

/* Creates the queue pair over slots at `memory`, channel_memory_bytes in all, which lie in the link's slab. */
int channel_create(struct channel* channel, struct endpoint* endpoint, uint32_t index, char* memory);
void channel_destroy(struct channel* channel);
uint64_t channel_memory_bytes(const mlxdist_options* options, enum wire_channel kind);

/* A new queue pair in the place of one that failed, not connected yet. */
int channel_reopen(struct channel* channel, uint32_t epoch);

int channel_send(struct channel* channel, const struct outgoing_message* message);

/* Sends the message that the caller has written into the next slot, all of it. */
int channel_send_written(struct channel* channel, uint32_t length);

/* The peer has received no more than up to `received`, though what was acknowledged since has reached it by another
 * link: its numbers are those of messages without content. */
void channel_skip_after(struct channel* channel, uint32_t received);

/* Posts what stands in a slot. `again`: it is a retransmission, whose completion has to be known. */
int channel_post_slot(struct channel* channel, uint32_t slot, bool again);

/* Posts a message of a control buffer, which is not kept. Where the port of an idle channel is down nothing is posted,
 * and what is not acknowledged leaves by another link. */
int channel_post_send(struct channel* channel, struct ibv_sge* list, int entries, bool signaled);

/* Where the options ask for checksums: that of a message in two pieces. */
void channel_seal(char* bytes, uint32_t length, const char* user, uint32_t user_length);

/* This work request, and all before it, have left the send queue. */
static inline void channel_complete(struct channel* channel, uint32_t request) { channel->completed = request; }

/* What stands between a new queue pair and its first message, on this side and on the peer's. */
static inline void channel_mark_connected(struct channel* channel) { channel->connected = true; }
static inline void channel_mark_answered(struct channel* channel) { channel->answered = true; }
/* Whether messages may leave from now on: both sides are ready. */
static inline bool channel_try_open(struct channel* channel) {
  channel->open = channel->connected && channel->answered;
  return channel->open;
}
/* Nothing leaves any more, until there is another queue pair. */
static inline void channel_disconnect(struct channel* channel) {
  channel->connected = channel->answered = channel->open = false;
}
/* Nothing leaves any more. */
static inline void channel_shut(struct channel* channel) { channel->open = false; }

/* The port is looked at before the next message. */
static inline void channel_mark_idle(struct channel* channel) { channel->idle = true; }

/* The slot of the first message that is not acknowledged; where all are, of the next one. */
uint32_t channel_oldest_slot(const struct channel* channel);

/* Whether a message may have to leave again from user memory within these bytes. */
bool channel_references(const struct channel* channel, const char* data, uint64_t bytes);

static inline enum wire_channel channel_kind(const struct channel* channel) { return channel->index % 2; }
static inline uint32_t channel_link(const struct channel* channel) { return channel->index / 2; }
static inline const char* channel_name(const struct channel* channel) {
  return channel_kind(channel) == WIRE_EAGER ? "eager" : "bulk";
}
static inline char* channel_send_slot(const struct channel* channel, uint32_t slot) {
  return channel->send_slots + (uint64_t)slot * channel->slot_bytes;
}

/* Whether a work request is not known to have left. One of long ago is not between these two, though numbers wrap. */
static inline bool channel_is_pending(const struct channel* channel, uint32_t request) {
  return request - channel->completed - 1 < channel->requests - channel->completed;
}

/* Whether all retransmissions have left the send queue. An acknowledgement says only that a message has left once:
 * while its retransmission waits there, the slot and the user's memory that it is read from must stay as they are. */
static inline bool channel_is_clear(const struct channel* channel) {
  return !channel_is_pending(channel, channel->last_retransmit);
}

/* Whether the slots have all messages from there on, and none of them waits in the send queue. An acknowledgement that
 * was late may be of long ago. */
static inline bool channel_can_skip_after(const struct channel* channel, uint32_t received) {
  return channel->sent - received <= channel->slots && channel_is_clear(channel);
}

/* Whether the send queue has room for one more. */
static inline bool channel_has_request(const struct channel* channel) {
  return channel->open && channel->requests - channel->completed < 2 * channel->slots;
}

/* wr_id says on which channel and slot or request a work request was: nothing of it travels. */
#define CHANNEL_EPOCHS 0x0fffu /* it has room for */
static inline uint64_t channel_wr_id_base(int32_t peer, uint32_t index, uint32_t epoch) {
  return (uint64_t)(epoch & CHANNEL_EPOCHS) << 51 | (uint64_t)index << 48 | (uint64_t)(uint32_t)peer << 32;
}
static inline uint64_t channel_wr_id(const struct channel* channel, bool send, uint32_t number) {
  return (uint64_t)send << 63 | channel->wr_id | number;
}
