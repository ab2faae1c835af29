/* Retransmission: what the peer has not acknowledged leaves again, all of it from the first one on (go-back-N). */
#pragma once

#include "channel.h"

/* Sends everything again that has not been acknowledged, unless the last retransmission has yet to leave. */
int channel_retransmit(struct channel* channel);

/* Of the timers: whether what was sent has been without an acknowledgement for so long that it is to leave again. */
bool retransmission_is_due(struct channel* channel, uint64_t now_ns);
