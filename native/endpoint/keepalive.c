#include "keepalive.h"

#include "cable.h"
#include "debug.h"
#include "engine.h"

/* A cable that was pulled sooner after a message is noticed by its silence. */
#define REST_NS 1000000000u

static bool is_due(const struct channel *channel, uint64_t quiet_ns) {
  const struct engine *engine = channel->engine;
  double seconds = engine->options.keepalive;
  bool works = channel->open && !(channel->peer->dead_links >> channel->index / 2 & 1) && !engine->finalized;
  return seconds > 0 && (double)quiet_ns > seconds * 1e9 && works && channel->acked == channel->sent;
}

static int send_sign(struct channel *channel) {
  struct peer *peer = channel->peer;
  bool sent;
  channel->rested = channel->device->whole_frames;
  int status = channel_acknowledge(channel, peer->ready_group, peer->ready, 0, &sent);
  if (status || !sent) return status;
  uint32_t most = channel->acked + channel->slots - 1;
  if (!channel->reserve && wire_at_least(channel->credit, most)) channel->credit = most;
  debug(DEBUG_TRACE, "message", "to rank %d: a sign of life on the %s queue pair %u", peer->rank, channel_name(channel),
        channel->index / 2);
  return MLXDIST_OK;
}

int keepalive_look(struct channel *channel, uint64_t now) {
  if (channel->seen_requests != channel->requests || !channel->quiet_since_ns) {
    channel->seen_requests = channel->requests;
    channel->quiet_since_ns = now;
    return MLXDIST_OK;
  }
  uint64_t quiet_ns = now - channel->quiet_since_ns;
  if (quiet_ns > REST_NS && channel->device->whole_frames) channel->rested = true;
  return is_due(channel, quiet_ns) ? send_sign(channel) : MLXDIST_OK;
}

int keepalive_wake(struct channel *channel, bool *posts) {
  channel->rested = false;
  *posts = device_is_up(channel->device);
  return *posts ? MLXDIST_OK : cable_cut(channel);
}
