#include "keepalive.h"

#include "acknowledgement.h"
#include "credit.h"
#include "debug.h"

/* A cable that was pulled sooner after a message is noticed by its silence. */
#define IDLE_NS 1000000000u

static bool is_due(const struct channel *channel, uint64_t quiet_ns) {
  const struct transport *transport = channel->transport;
  double seconds = transport->options->keepalive;
  bool works = channel->open && !link_is_dead(channel->endpoint, channel_link(channel));
  return seconds > 0 && (double)quiet_ns > seconds * 1e9 && works && !transport->keepalive_stopped &&
         channel->acked == channel->sent;
}

static int send_keepalive(struct channel *channel) {
  bool sent;
  if (channel->device->whole_frames) channel_mark_idle(channel);
  int status = acknowledgement_send(channel, 0, &sent);
  if (status || !sent) return status;
  if (!channel->reserve) credit_limit(channel, channel->acked + channel->slots - 1);
  debug(DEBUG_TRACE, "message", "to rank %d: a keepalive on the %s queue pair %u", channel->peer, channel_name(channel),
        channel_link(channel));
  return MLXDIST_OK;
}

int keepalive_probe(struct endpoint *endpoint) {
  bool sent;
  struct channel *channel = endpoint_eager(endpoint);
  if (channel->device->whole_frames) channel_mark_idle(channel);
  return acknowledgement_send(channel, WIRE_PROBE, &sent);
}

int keepalive_tick(struct channel *channel, uint64_t now) {
  if (channel->seen_requests != channel->requests || !channel->quiet_since_ns) {
    channel->seen_requests = channel->requests;
    channel->quiet_since_ns = now;
    return MLXDIST_OK;
  }
  uint64_t quiet_ns = now - channel->quiet_since_ns;
  if (quiet_ns > IDLE_NS && channel->device->whole_frames) channel_mark_idle(channel);
  return is_due(channel, quiet_ns) ? send_keepalive(channel) : MLXDIST_OK;
}
