#include "retransmission.h"

#include "acknowledgement.h"
#include "debug.h"
#include "reconnect.h"
#include "transport.h"

/* A message that was not acknowledged for so long is retransmitted, then after twice the time and so on. Longer than
 * the peer's progress thread sleeps and then waits for a ride. */
#define RTO_MIN_NS 40000000u
#define RTO_MAX_NS 1000000000u

int channel_retransmit(struct channel *channel) {
  uint32_t unacked = channel->sent - channel->acked;
  if (!channel_is_clear(channel)) return MLXDIST_OK;
  if (unacked)
    debug(DEBUG_INFO, "message", "%u to rank %d are retransmitted, from number %u of the %s queue pair %u on", unacked,
          channel->peer, channel->acked + 1 - WIRE_START, channel_name(channel), channel_link(channel));
  uint32_t slot = channel_oldest_slot(channel);
  for (; unacked > 0 && channel_has_request(channel); unacked--, slot = (slot + 1) % channel->slots) {
    (void)piggyback_acks(channel->endpoint, (struct wire_header *)channel_send_slot(channel, slot));
    int status = channel_post_slot(channel, slot, true);
    if (status) return status;
    channel->last_retransmit = channel->requests;
    count(&channel->transport->counters->retransmissions, 1);
  }
  return MLXDIST_OK;
}

/* Whether completions are missing without which no message can leave, or no acknowledgement. */
static bool lacks_completions(const struct channel *channel) {
  return channel->open && !(channel_is_clear(channel) && acknowledgement_is_possible(channel));
}

bool retransmission_is_due(struct channel *channel, uint64_t now) {
  if (channel->acked == channel->sent && !lacks_completions(channel)) {
    channel->unacked_since_ns = 0;
  } else if (!channel->unacked_since_ns || channel->seen_acked != channel->acked) {
    channel->unacked_since_ns = now;
    channel->rto_ns = RTO_MIN_NS;
    channel->seen_acked = channel->acked;
    channel->retry_count = 0;
    reconnect_forget(channel);
  } else if (now - channel->unacked_since_ns > channel->rto_ns) {
    channel->unacked_since_ns = now;
    if (channel->rto_ns < RTO_MAX_NS) channel->rto_ns *= 2;
    channel->retry_count++;
    return true;
  }
  return false;
}
