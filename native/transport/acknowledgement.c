#include "acknowledgement.h"

#include "credit.h"

/* An acknowledgement waits this long for a message to ride on. */
#define DELAYED_ACK_NS 10000000u

static bool is_due(const struct channel *channel, bool lazily) {
  const struct wire_acks *last = &channel->endpoint->last_sent[channel_link(channel)];
  uint32_t i = channel_kind(channel), window = channel->slots - channel->reserve;
  uint32_t share = lazily ? window - window / 4 : channel->ack_share;
  uint32_t credit = channel->received + channel_recv_credits(channel);
  return channel->received - last->ack[i] >= share || credit - (last->ack[i] + last->credits[i]) >= share;
}

bool acknowledgement_is_due(const struct endpoint *endpoint, bool lazily) {
  if (endpoint->ack_now || endpoint->ack_requested || endpoint->nak_pending) return true;
  for (uint32_t i = 0; i < endpoint->channel_count; i++)
    if (is_due(&endpoint->channels[i], lazily)) return true;
  return false;
}

/* The first buffer that an acknowledgement may be written to; control_buffers() where there is none. */
static uint32_t free_buffer(const struct channel *channel) {
  uint32_t buffer = 0, buffers = control_buffers(channel_kind(channel));
  while (buffer < buffers && channel_is_pending(channel, channel->control_requests[buffer])) buffer++;
  return buffer;
}

bool acknowledgement_is_possible(const struct channel *channel) {
  return channel_has_request(channel) && free_buffer(channel) < control_buffers(channel_kind(channel));
}

/* The channels that lack a message, as a mask. */
static uint8_t take_naks(struct endpoint *endpoint) {
  uint32_t naks = endpoint->nak_pending;
  for (uint32_t i = 0; i < endpoint->channel_count; i++)
    if (naks >> i & 1) endpoint->channels[i].nak_sent_for = endpoint->channels[i].received;
  endpoint->nak_pending = 0;
  return (uint8_t)naks;
}

int acknowledgement_send(struct channel *channel, uint8_t flags, bool *sent) {
  struct endpoint *endpoint = channel->endpoint;
  struct transport *transport = channel->transport;
  *sent = false;
  if (!acknowledgement_is_possible(channel)) return MLXDIST_OK; /* a later turn will */
  uint32_t buffer = free_buffer(channel);
  struct wire_header *header = (struct wire_header *)(channel->control + (size_t)buffer * CHANNEL_EAGER_BYTES);
  *header = (struct wire_header){.magic = WIRE_MAGIC, .kind = WIRE_ACK, .flags = flags, .naks = take_naks(endpoint)};
  uint32_t bytes = piggyback_acks(endpoint, header);
  transport->callbacks->fill_ack(endpoint, header);
  if (transport->options->checksum) channel_seal((char *)header, bytes, 0, 0);
  struct ibv_sge sge = {.addr = (uintptr_t)header, .length = bytes, .lkey = channel->lkey};
  int status = channel_post_send(channel, &sge, 1, true);
  channel->control_requests[buffer] = channel->requests;
  *sent = true;
  count(&transport->counters->control_messages_sent, 1);
  count(&transport->counters->header_bytes_sent, bytes);
  return status;
}

void acknowledgement_tick(struct channel *channel, uint64_t now) {
  if (channel->received == channel->endpoint->last_sent[channel_link(channel)].ack[channel_kind(channel)]) {
    channel->ack_pending_since_ns = 0;
  } else if (!channel->ack_pending_since_ns || channel->seen_received != channel->received) {
    channel->ack_pending_since_ns = now;
    channel->seen_received = channel->received;
  } else if (now - channel->ack_pending_since_ns > DELAYED_ACK_NS) {
    channel->endpoint->ack_now = true;
    endpoint_mark_ack(channel->endpoint);
  }
}
