/*
 * A channel: one UC queue pair to one peer with its slots, sequence numbers, credits and acknowledgements.
 *
 * UC keeps order but not delivery: a SEND that meets no posted receive vanishes, and the sender still
 * completes. So a message is sent only when the peer is known to have a receive posted for it (credit),
 * its slot is kept until the peer has said that it arrived (acknowledgement), and its sequence number
 * tells the receiver when one is missing.
 *
 * Every receive slot is either posted or holds an arrived message, always: posted + arrived = slots.
 */
#ifndef MLXDIST_ENDPOINT_CHANNEL_H
#define MLXDIST_ENDPOINT_CHANNEL_H

#include "verbs.h"
#include "wire.h"

#include <stdbool.h>

struct engine;
struct peer;

/* The first message of a stream needs room for header and descriptor. The others leave the descriptor's
 * place unused, so that all pieces of a stream have the same size on every rank. */
#define CHANNEL_OVERHEAD (sizeof(struct wire_header) + sizeof(struct wire_descriptor))

/* The last eager slots are for control messages alone: an acknowledgement must get through when data
 * that nobody has asked for yet fills all others. */
#define CHANNEL_CONTROL_SLOTS 2u

struct channel {
  struct engine *engine;
  struct peer *peer;
  struct ibv_qp *qp;
  uint32_t lkey;
  uint32_t index; /* enum wire_channel */
  uint32_t slot_bytes, slots;
  char *send_slots, *receive_slots;

  uint32_t sent;      /* sequence of the last message sent */
  uint32_t send_slot; /* for the next one */
  uint32_t sent_data; /* of the last one that was no acknowledgement */
  uint32_t completed; /* of the last one known to have left the send queue */
  uint32_t acked;     /* of the last one that the peer has */
  uint32_t credit;    /* highest one that the peer has a receive for */

  uint32_t received;              /* sequence of the last message that arrived */
  uint32_t posted;                /* sequence of the last message that has a receive: the credit we may give */
  uint32_t told_ack, told_credit; /* what the peer was told last */
  uint32_t *arrived;              /* ring of slots that hold data not taken yet, oldest first */
  uint32_t arrived_first, arrived_count;
};

/* A message that has arrived: points into its slot, valid until channel_release. */
struct message {
  const struct wire_header *header;
  const struct wire_descriptor *descriptor; /* of the first message of a stream, else NULL */
  const char *payload;
};

/* What to send. `payload` is copied into the slot. */
struct outgoing_message {
  enum wire_kind kind;
  uint32_t stream;
  uint64_t offset;
  const struct wire_descriptor *descriptor; /* NULL but for the first message of a stream */
  const void *payload;
  uint32_t length;
};

/* Creates the queue pair over `slots` send slots and as many receive slots at `memory`. */
int channel_create(struct channel *channel, struct engine *engine, struct peer *peer, uint32_t index, char *memory,
                   uint32_t lkey);
void channel_destroy(struct channel *channel);
uint64_t channel_memory_bytes(uint32_t slots, uint32_t slot_bytes);

/* RESET to INIT happens in channel_create. These bring it to RTR and RTS, and post every receive slot. */
int channel_connect(struct channel *channel, const union ibv_gid *gid, uint16_t lid, uint32_t qp_num,
                    uint32_t remote_psn, uint32_t local_psn, enum ibv_mtu mtu);
int channel_post_all(struct channel *channel);

bool channel_can_send(const struct channel *channel, enum wire_kind kind);
int channel_send(struct channel *channel, const struct outgoing_message *message);

/* The oldest message not taken yet. False if there is none. */
bool channel_head(const struct channel *channel, struct message *message);
/* Gives the slot of the oldest message back to the peer. */
int channel_release(struct channel *channel);

/* Called by the engine for each completion. */
void channel_on_sent(struct channel *channel, uint32_t sequence);
int channel_on_received(struct channel *channel, uint32_t slot, uint32_t bytes);

/* Whether the peer waits for news: `lazily` leaves more of the window open in the hope of a ride. */
bool channel_owes_news(const struct channel *channel, bool lazily);

#endif
