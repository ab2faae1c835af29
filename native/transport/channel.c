#include "channel.h"

#include "acknowledgement.h"
#include "credit.h"
#include "debug.h"
#include "error.h"
#include "queue_pair.h"
#include "transport.h"

#include <stdlib.h>
#include <string.h>

static uint32_t slots_of(const mlxdist_options *options, enum wire_channel kind) {
  return kind == WIRE_EAGER ? options->eager_slots : options->bulk_slots;
}

static uint32_t slot_bytes_of(const mlxdist_options *options, enum wire_channel kind) {
  return kind == WIRE_EAGER ? CHANNEL_EAGER_BYTES : options->bulk_slot_bytes;
}

uint64_t channel_memory_bytes(const mlxdist_options *options, enum wire_channel kind) {
  return 2ull * slots_of(options, kind) * slot_bytes_of(options, kind) +
         (uint64_t)control_buffers(kind) * CHANNEL_EAGER_BYTES;
}

int channel_create(struct channel *channel, struct endpoint *endpoint, uint32_t index, char *memory) {
  struct transport *transport = endpoint->transport;
  const struct link *link = &endpoint->links[index / 2];
  enum wire_channel kind = index % 2;
  uint32_t slots = slots_of(transport->options, kind), slot_bytes = slot_bytes_of(transport->options, kind);
  uint32_t reserve = kind == WIRE_EAGER ? CHANNEL_CONTROL_SLOTS : 0;
  /* Control buffers stand before the slots: where frames count, what is behind them makes them as long as a slot. */
  char *send_slots = memory + (size_t)control_buffers(kind) * CHANNEL_EAGER_BYTES;
  *channel = (struct channel){.transport = transport,
                              .endpoint = endpoint,
                              .peer = endpoint->rank,
                              .link = link,
                              .device = link->device,
                              .wr_id = channel_wr_id_base(endpoint->rank, index, 0),
                              .index = index,
                              .slot_bytes = slot_bytes,
                              .slots = slots,
                              .reserve = reserve,
                              .control = memory,
                              .send_slots = send_slots,
                              .receive_slots = send_slots + (uint64_t)slots * slot_bytes,
                              .sent = WIRE_START,
                              .acked = WIRE_START,
                              .credit = WIRE_START + slots - reserve, /* the peer has as many: its address says so */
                              .received = WIRE_START,
                              .ack_share = (slots - reserve) / 2 > 0 ? (slots - reserve) / 2 : 1,
                              .nak_sent_for = WIRE_START - 1,
                              .seen_acked = WIRE_START,
                              .seen_received = WIRE_START,
                              .kept = calloc(slots, sizeof(struct kept_message)),
                              .recv_descs = calloc(slots, sizeof(struct recv_desc))};
  endpoint->acks[index / 2].ack[kind] = endpoint->last_sent[index / 2].ack[kind] = WIRE_START;
  if (!channel->recv_descs || !channel->kept)
    return fail(MLXDIST_RESOURCES, "out of memory for a queue pair to rank %d", endpoint->rank);
  for (uint32_t slot = 0; slot < slots; slot++) {
    char *bytes = channel->receive_slots + (uint64_t)slot * slot_bytes;
    channel->recv_descs[slot] = (struct recv_desc){.channel = channel, .bytes = bytes, .posted = true};
  }
  return queue_pair_create(channel);
}

void channel_destroy(struct channel *channel) {
  (void)queue_pair_destroy(channel);
  free(channel->recv_descs);
  free(channel->kept);
  *channel = (struct channel){0};
}

int channel_reopen(struct channel *channel, uint32_t epoch) {
  channel_disconnect(channel); /* also if that fails: no abort may be posted there */
  int error = queue_pair_destroy(channel);
  if (error) return queue_pair_fail(channel, "destroy_qp", error);
  count(&channel->transport->counters->receives_posted, (uint64_t)-(int64_t)channel->outstanding);
  credit_reset(channel);
  channel->completed = channel->requests;
  channel->epoch = epoch;
  channel->wr_id = channel_wr_id_base(channel->peer, channel->index, epoch);
  return queue_pair_create(channel);
}

void channel_seal(char *bytes, uint32_t length, const char *user, uint32_t user_length) {
  struct wire_header *header = (struct wire_header *)bytes;
  header->checksum = checksum(wire_checksum(bytes, length), user, user_length);
}

/* On a port whose cable was pulled Apple's library crashes in a post: the port is looked at first. */
static bool wake(struct channel *channel, int *status) {
  channel->idle = false;
  bool up = device_is_up(channel->device);
  *status = up ? MLXDIST_OK : link_port_down(channel);
  return up;
}

int channel_post_send(struct channel *channel, struct ibv_sge *list, int entries, bool signaled) {
  struct transport_counters *counters = channel->transport->counters;
  int status;
  if (channel->idle && !wake(channel, &status)) return status;
  channel->requests++;
  if (channel->device->whole_frames) { /* one entry: such a device does not gather */
    count(&counters->padding_bytes_sent, channel->slot_bytes - list->length);
    list->length = channel->slot_bytes;
  }
  struct ibv_send_wr request = {.wr_id = channel_wr_id(channel, true, channel->requests),
                                .sg_list = list,
                                .num_sge = entries,
                                .opcode = IBV_WR_SEND,
                                .send_flags = signaled || channel->device->signals_all ? IBV_SEND_SIGNALED : 0},
                     *bad;
  int error = ibv_post_send(channel->qp, &request, &bad);
  if (error) return queue_pair_fail(channel, "post_send", error);
  count(&counters->post_send_calls, 1);
  count(&counters->messages_sent, 1);
  return MLXDIST_OK;
}

/* Of a retransmission the completion has to be known; else one signaled message twice a window is enough:
 * acknowledgements free the slots, completions only the send queue. Errors complete in any case. */
int channel_post_slot(struct channel *channel, uint32_t slot, bool again) {
  const struct kept_message *kept = &channel->kept[slot];
  char *bytes = channel_send_slot(channel, slot);
  if (channel->transport->options->checksum) channel_seal(bytes, kept->length, kept->user, kept->user_length);
  struct ibv_sge list[2] = {{.addr = (uintptr_t)bytes, .length = kept->length, .lkey = channel->lkey},
                            {.addr = (uintptr_t)kept->user, .length = kept->user_length, .lkey = kept->user_lkey}};
  bool signaled = again || (channel->requests + 1) % (channel->slots / 2) == 0;
  return channel_post_send(channel, list, kept->user ? 2 : 1, signaled);
}

uint32_t channel_oldest_slot(const struct channel *channel) {
  return (channel->send_slot + channel->slots - (channel->sent - channel->acked)) % channel->slots;
}

void channel_skip_after(struct channel *channel, uint32_t received) {
  if (!wire_at_least(channel->acked, received)) return; /* it has come late, all of it */
  uint32_t elsewhere = channel->acked - received;
  channel_unacknowledge(channel, received);
  for (uint32_t slot = channel_oldest_slot(channel); elsewhere > 0; elsewhere--, slot = (slot + 1) % channel->slots) {
    struct wire_header *header = (struct wire_header *)channel_send_slot(channel, slot);
    header->kind = WIRE_SKIP;
    header->flags = WIRE_LINKS;
    header->length = 0;
    channel->kept[slot] = (struct kept_message){.length = sizeof *header + sizeof(struct wire_links)};
  }
}

bool channel_references(const struct channel *channel, const char *data, uint64_t bytes) {
  uint32_t slot = channel_oldest_slot(channel);
  for (uint32_t left = channel->sent - channel->acked; left > 0; left--, slot = (slot + 1) % channel->slots) {
    const struct kept_message *kept = &channel->kept[slot];
    if (kept->user && kept->user < data + bytes && data < kept->user + kept->user_length) return true;
  }
  return !channel_is_clear(channel);
}

/* The message in the next slot has left. */
static inline void advance(struct channel *channel) {
  channel->sent++;
  channel->send_slot = channel->send_slot + 1 == channel->slots ? 0 : channel->send_slot + 1;
}

int channel_send_written(struct channel *channel, uint32_t length) {
  channel->kept[channel->send_slot] = (struct kept_message){.length = length};
  int status = channel_post_slot(channel, channel->send_slot, false);
  if (!status) advance(channel);
  return status;
}

int channel_send(struct channel *channel, const struct outgoing_message *message) {
  uint32_t slot = channel->send_slot;
  char *bytes = channel_send_slot(channel, slot);
  struct wire_header *header = (struct wire_header *)bytes;
  *header = (struct wire_header){
      .magic = WIRE_MAGIC,
      .kind = (uint8_t)message->kind,
      .flags = message->flags | (message->descriptor ? WIRE_FIRST : 0),
      .group = message->group,
      .sequence = channel->sent + 1,
      .place = message->place,
      .offset = message->offset,
      .length = message->length,
      .cts = message->cts,
      .label = message->label,
      .index = message->index,
  };
  uint32_t before = piggyback_acks(channel->endpoint, header);
  if (message->descriptor) {
    memcpy(bytes + before, message->descriptor, sizeof *message->descriptor);
    before += sizeof *message->descriptor;
  }
  bool copies = !message->user_lkey;
  if (copies && message->length) memcpy(bytes + before, message->payload, message->length);
  channel->kept[slot] = copies ? (struct kept_message){.length = before + message->length}
                               : (struct kept_message){.length = before,
                                                       .user = message->payload,
                                                       .user_length = message->length,
                                                       .user_lkey = message->user_lkey};
  int status = channel_post_slot(channel, slot, false);
  if (status) return status;
  debug(DEBUG_TRACE, "message",
        "to rank %d: number %u of the %s queue pair %u: kind %d, place %u of group %u, byte "
        "%llu, %u bytes%s",
        channel->peer, header->sequence - WIRE_START, channel_name(channel), channel_link(channel), message->kind,
        message->place - WIRE_START, message->group, (unsigned long long)message->offset, message->length,
        copies ? "" : ", not copied");
  advance(channel);
  struct transport_counters *counters = channel->transport->counters;
  count(&counters->header_bytes_sent, before);
  if (message->kind == WIRE_DATA) return MLXDIST_OK;
  count(&counters->control_messages_sent, 1);
  count(&counters->header_bytes_sent, message->length);
  return MLXDIST_OK;
}
