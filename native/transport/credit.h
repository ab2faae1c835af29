/*
 * Credit, the flow control: a message is sent only when the peer is known to have a receive posted for it. What this
 * rank has posted leaves with every message and acknowledgement (wire.h).
 */
#pragma once

#include "transport.h"

/* Receives that data may use. Those of control messages are posted again at once, so this never shrinks. */
static inline uint32_t channel_recv_credits(const struct channel* channel) {
  return channel->outstanding > channel->reserve ? channel->outstanding - channel->reserve : 0;
}

/* Whether the peer is known to have a receive for one more message, and a slot is free for it. An abort may use what is
 * kept free for it. */
static inline bool channel_can_send(const struct channel* channel, enum wire_kind kind) {
  uint32_t extra = kind == WIRE_ABORT ? channel->reserve : 0;
  uint32_t next = channel->sent + 1, slots = channel->slots - channel->reserve;
  return wire_at_least(channel->acked + slots + extra, next) && wire_at_least(channel->credit + extra, next) &&
         channel_has_request(channel) && channel_is_clear(channel);
}

/* The peer has said what it has received, and has receives for. The queue pairs are not ordered with each other, so
 * this may be older than what is known. */
static inline void channel_on_ack(struct channel* channel, uint32_t received, uint32_t receives) {
  uint32_t credit = received + receives;
  if (wire_at_least(received, channel->acked)) channel->acked = received;
  if (wire_at_least(credit, channel->credit)) channel->credit = credit;
}

/* The first message that is not acknowledged has left by another link: nothing is to come for it here. */
static inline void channel_forget_oldest(struct channel* channel) { channel->acked++; }

/* The peer lacks what follows `received`: nothing of it was acknowledged. */
static inline void channel_unacknowledge(struct channel* channel, uint32_t received) { channel->acked = received; }

/* One receive may be taken: until the peer has said more, nothing after `last` leaves. */
static inline void credit_limit(struct channel* channel, uint32_t last) {
  if (wire_at_least(channel->credit, last)) channel->credit = last;
}

/* A receive more is posted: the peer is to hear of it with the next message, or, if there are many, without one. */
static inline void credit_add(struct channel* channel) {
  struct endpoint* endpoint = channel->endpoint;
  uint32_t link = channel_link(channel), i = channel_kind(channel);
  const struct wire_acks* last = &endpoint->last_sent[link];
  channel->outstanding++;
  uint32_t credits = channel_recv_credits(channel);
  endpoint->acks[link].credits[i] = (uint16_t)credits;
  if (channel->received + credits - (last->ack[i] + last->credits[i]) >= channel->ack_share)
    endpoint_mark_ack(endpoint);
}

/* No receive is posted any more. */
static inline void credit_reset(struct channel* channel) {
  channel->outstanding = 0;
  channel->endpoint->acks[channel_link(channel)].credits[channel_kind(channel)] = 0;
}

/* A message has taken a receive. */
static inline void credit_remove(struct channel* channel) {
  channel->outstanding--;
  struct wire_acks* acks = &channel->endpoint->acks[channel_link(channel)];
  acks->credits[channel_kind(channel)] = (uint16_t)channel_recv_credits(channel);
}
