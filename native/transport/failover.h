/*
 * Failover: two ranks may be joined by more than one link. Large messages are spread over them; one that dies is
 * dropped.
 *
 * A link is suspect when a message was retransmitted several times and never acknowledged. The peer is then asked for a
 * reply on another one. Without a reply the peer itself is stopped. With one the link is dead: what was not
 * acknowledged leaves again by the other, marked, because it may have arrived after all.
 */
#pragma once

#include "endpoint.h"

/* After 40 + 80 + 160 + 320 ms. */
#define FAILOVER_RETRIES 4u

/* Nothing is acknowledged on this channel: requests a reply on another link, if there is one. */
int failover_probe(struct channel* channel);

/* An acknowledgement has come on this channel: perhaps a probe, or the reply to one. */
void failover_on_ack(struct channel* channel, const struct wire_header* header);

/* Replies where the peer has asked for it. */
int failover_reply(struct endpoint* endpoint);

/* Sends by a link that works what was left on a dead one, as far as there is room. */
int failover_resend(struct endpoint* endpoint);
