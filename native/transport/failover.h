/*
 * Failover: two ranks may be joined by several links. Large messages are spread over them; one that dies is dropped,
 * until it works again.
 *
 * A link is suspect when a message was retransmitted several times and never acknowledged. The peer is then asked for a
 * reply on each of the others, since more than one may have died. Without a reply the peer itself is stopped. With one
 * the suspect link is dead: what was not acknowledged leaves again by another, marked, because it may have arrived
 * after all. The peer learns which links are dead, and takes what they bring late for possible repetitions, too.
 *
 * The peer is asked for replies on a dead link as well. A link that has brought several in a row is used again. The
 * numbers that its peer lacks there have left by other links, so messages without content (WIRE_SKIP) take them.
 *
 * Rejected: new queue pairs for a link that works again. That needs the side channel, and a device may have none left.
 */
#pragma once

#include "endpoint.h"

/* After 40 + 80 + 160 + 320 ms. */
#define FAILOVER_RETRIES 4u

/* A dead link is tried this often, and used once that number of replies has come in a row. */
#define FAILOVER_TRIAL_NS 250000000u
#define FAILOVER_TRIALS 4u

/* Nothing is acknowledged on this channel: requests replies on the other links, if there are any. */
int failover_probe(struct channel* channel);

/* An acknowledgement has come on this channel: perhaps a probe, or the reply to one. */
int failover_on_ack(struct channel* channel, const struct wire_header* header);

/* A message without content has come in order: what follows on this link is new. */
void failover_on_skip(const struct channel* channel);

/* The peer holds these links for dead, as a mask: what they bring from now on may have come by another. This rank uses
 * them no more, either: the peer may have given up their queue pairs, and neither says nor receives anything there.
 * Once only: the two ranks find at different times that one works again. */
void failover_on_dead_links(struct endpoint* endpoint, uint32_t links);

/* Replies where the peer has asked for it. */
int failover_reply(struct endpoint* endpoint);

/* Sends by a link that works what was left on a dead one, as far as there is room. */
int failover_resend(struct endpoint* endpoint);

/* Asks for replies on dead links, now and then. */
int failover_tick(struct endpoint* endpoint, uint64_t now_ns);
