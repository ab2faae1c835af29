/*
 * Acknowledgements, and the credits that leave with them: every message carries them (piggyback); one of their own,
 * which has no number and may be lost, leaves only where no message does in time.
 */
#pragma once

#include "endpoint.h"

#include <string.h>

/* Control buffers of a channel; on the bulk channel for keepalives (keepalive.h). */
static inline uint32_t control_buffers(enum wire_channel kind) {
  return kind == WIRE_EAGER ? CHANNEL_CONTROL_BUFFERS : 1;
}

/* The message that is about to leave says what has arrived. Returns the bytes of its header. */
static inline uint32_t piggyback_acks(struct endpoint* endpoint, struct wire_header* header) {
  endpoint->ack_now = false;
  header->acks = endpoint->last_sent[0] = endpoint->acks[0];
  if (endpoint->channel_count <= 2) return sizeof *header;
  struct wire_links* links = (struct wire_links*)(header + 1);
  memcpy(&endpoint->last_sent[1], &endpoint->acks[1], sizeof links->acks);
  memcpy(links->acks, &endpoint->acks[1], sizeof links->acks);
  links->dead_links = (uint8_t)endpoint->dead_links;
  memset(links->reserved, 0, sizeof links->reserved);
  header->flags |= WIRE_LINKS;
  return sizeof *header + sizeof *links;
}

/* Whether the peer waits for an acknowledgement: `lazily` leaves more of the window open. */
bool acknowledgement_is_due(const struct endpoint* endpoint, bool lazily);

/* Sends one with all that the peer should know, if it can. On eager channels; on the others as a keepalive. */
int acknowledgement_send(struct channel* channel, uint8_t flags, bool* sent);

/* Whether one can be sent. Where none can although all messages are acknowledged, completions are missing. */
bool acknowledgement_is_possible(const struct channel* channel);

/* Of the timers: what has arrived is acknowledged after a while, though it is little. */
void acknowledgement_tick(struct channel* channel, uint64_t now_ns);
