/*
 * Acknowledgements, and the credits that leave with them: every message carries them (piggyback); one of their own,
 * which has no number and may be lost, leaves only where no message does in time.
 */
#pragma once

#include "endpoint.h"

/* Control buffers of a channel; on the bulk channel for keepalives (keepalive.h). */
static inline uint32_t control_buffers(enum wire_channel kind) {
  return kind == WIRE_EAGER ? CHANNEL_CONTROL_BUFFERS : 1;
}

/* What the message that is about to leave says. */
static inline struct wire_acks piggyback_acks(struct endpoint* endpoint) {
  endpoint->ack_now = false;
  return endpoint->last_sent = endpoint->acks;
}

/* Whether the peer waits for an acknowledgement: `lazily` leaves more of the window open. */
bool acknowledgement_is_due(const struct endpoint* endpoint, bool lazily);

/* Sends one with all that the peer should know, if it can. On eager channels; on the others as a keepalive. */
int acknowledgement_send(struct channel* channel, uint8_t flags, bool* sent);

/* Whether one can be sent. Where none can although all messages are acknowledged, completions are missing. */
bool acknowledgement_is_possible(const struct channel* channel);

/* Of the timers: what has arrived is acknowledged after a while, though it is little. */
void acknowledgement_tick(struct channel* channel, uint64_t now_ns);
