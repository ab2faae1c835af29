/*
 * Cables: two ranks may be joined by more than one. Large messages are spread over them; one that dies is dropped.
 *
 * A cable is suspect when a message was repeated several times and never acknowledged. The peer is then asked to
 * answer on another one. If it does not, it is the peer that sleeps; if it does, the cable is dead: what was not
 * acknowledged is sent again by the other, marked, because it may have arrived after all.
 */
#ifndef MLXDIST_ENDPOINT_CABLE_H
#define MLXDIST_ENDPOINT_CABLE_H

#include "peer.h"

/* After 40 + 80 + 160 + 320 ms. */
#define CABLE_REPEATS 4u

/* Nothing is acknowledged on this channel: asks the peer for an answer on another cable, if there is one. */
int cable_suspect(struct channel* channel);

/* The port of the channel's cable is down: nothing is posted there any more. TRANSPORT if there is no other cable. */
int cable_cut(struct channel* channel);

/* A message has come on this channel. */
void cable_heard(struct channel* channel, const struct wire_header* header);

/* Answers where the peer has asked for it. */
int cable_answer(struct peer* peer);

/* Sends by a cable that works what was left on a dead one, as far as there is room. */
int cable_move_messages(struct peer* peer);

#endif
