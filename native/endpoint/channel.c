#include "channel.h"

#include "engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t channel_memory_bytes(uint32_t slots, uint32_t slot_bytes) { return 2ull * slots * slot_bytes; }

static const char *channel_name(const struct channel *channel) {
  return channel->index == WIRE_EAGER ? "eager" : "bulk";
}

static int fail_verb(const struct channel *channel, const char *verb, int error) {
  return fail(MLXDIST_TRANSPORT, "%s on the %s queue pair of rank %d to rank %d failed: %s", verb,
              channel_name(channel), channel->engine->rank, channel->peer->rank, strerror(error));
}

int channel_create(struct channel *channel, struct engine *engine, struct peer *peer, uint32_t index, char *memory,
                   uint32_t lkey) {
  uint32_t slots = index == WIRE_EAGER ? engine->options.eager_slots : engine->options.bulk_slots;
  uint32_t slot_bytes = index == WIRE_EAGER ? 4096 : engine->options.bulk_slot_bytes;
  *channel = (struct channel){
      .engine = engine,
      .peer = peer,
      .lkey = lkey,
      .index = index,
      .slot_bytes = slot_bytes,
      .slots = slots,
      .send_slots = memory,
      .receive_slots = memory + (uint64_t)slots * slot_bytes,
      .arrived = calloc(slots, sizeof(uint32_t)),
  };
  channel->sent = channel->sent_data = channel->completed = channel->acked = WIRE_START;
  channel->received = channel->posted = channel->told_ack = WIRE_START;
  if (!channel->arrived) return fail(MLXDIST_RESOURCES, "out of memory for a queue pair to rank %d", peer->rank);
  struct ibv_qp_init_attr init = {
      .send_cq = engine->cq,
      .recv_cq = engine->cq,
      /* Twice the slots: acknowledged messages may still wait in the send queue for the next signaled one. */
      .cap = {.max_send_wr = 2 * slots, .max_recv_wr = slots, .max_send_sge = 1, .max_recv_sge = 1},
      .qp_type = IBV_QPT_UC,
  };
  channel->qp = engine->verbs->create_qp(engine->pd, &init);
  if (!channel->qp) return fail_verb(channel, "create_qp", errno);
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_LOCAL_WRITE};
  int error = engine->verbs->modify_qp(channel->qp, &attr,
                                       IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  return error ? fail_verb(channel, "modify_qp to INIT", error) : MLXDIST_OK;
}

void channel_destroy(struct channel *channel) {
  if (channel->qp) channel->engine->verbs->destroy_qp(channel->qp);
  free(channel->arrived);
  *channel = (struct channel){0};
}

int channel_connect(struct channel *channel, const union ibv_gid *gid, uint16_t lid, uint32_t qp_num,
                    uint32_t remote_psn, uint32_t local_psn, enum ibv_mtu mtu) {
  const struct verbs *verbs = channel->engine->verbs;
  struct ibv_qp_attr attr = {
      .qp_state = IBV_QPS_RTR,
      .path_mtu = mtu,
      .dest_qp_num = qp_num,
      .rq_psn = remote_psn,
      .ah_attr = {.grh = {.dgid = *gid, .hop_limit = 1}, .dlid = lid, .is_global = 1, .port_num = 1},
  };
  int error = verbs->modify_qp(channel->qp, &attr,
                               IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN);
  if (error) return fail_verb(channel, "modify_qp to RTR", error);
  attr = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS, .sq_psn = local_psn};
  error = verbs->modify_qp(channel->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
  return error ? fail_verb(channel, "modify_qp to RTS", error) : MLXDIST_OK;
}

static int post_receive(struct channel *channel, uint32_t slot) {
  struct ibv_sge sge = {.addr = (uintptr_t)(channel->receive_slots + (uint64_t)slot * channel->slot_bytes),
                        .length = channel->slot_bytes,
                        .lkey = channel->lkey};
  struct ibv_recv_wr request = {.wr_id = engine_wr_id(channel, false, slot), .sg_list = &sge, .num_sge = 1}, *bad;
  int error = ibv_post_recv(channel->qp, &request, &bad);
  if (error) return fail_verb(channel, "post_recv", error);
  channel->posted++;
  count(&channel->engine->counters.post_recv_calls, 1);
  count(&channel->engine->counters.receives_posted, 1);
  return MLXDIST_OK;
}

int channel_post_all(struct channel *channel) {
  for (uint32_t slot = 0; slot < channel->slots; slot++) {
    int status = post_receive(channel, slot);
    if (status) return status;
  }
  /* The peer has the same number of slots (its address says so) and starts from the same knowledge. */
  channel->credit = channel->told_credit = channel->posted;
  return MLXDIST_OK;
}

bool channel_can_send(const struct channel *channel, enum wire_kind kind) {
  uint32_t reserve = channel->index == WIRE_EAGER && kind == WIRE_DATA ? CHANNEL_CONTROL_SLOTS : 0;
  uint32_t next = channel->sent + 1;
  return wire_at_least(channel->acked + channel->slots, next + reserve) &&
         wire_at_least(channel->credit, next + reserve) &&
         wire_at_least(channel->completed + 2 * channel->slots, next);
}

/* What rides on every message: how far both channels from this peer have got. */
static void write_news(struct peer *peer, struct wire_header *header) {
  for (int i = 0; i < WIRE_CHANNELS; i++) {
    struct channel *channel = &peer->channels[i];
    header->ack[i] = channel->told_ack = channel->received;
    header->credit[i] = channel->told_credit = channel->posted;
  }
}

static void read_news(struct peer *peer, const struct wire_header *header) {
  for (int i = 0; i < WIRE_CHANNELS; i++) {
    struct channel *channel = &peer->channels[i];
    /* The two queue pairs are not ordered with each other, so news may be older than what is known. */
    if (wire_at_least(header->ack[i], channel->acked)) channel->acked = header->ack[i];
    if (wire_at_least(header->credit[i], channel->credit)) channel->credit = header->credit[i];
  }
}

int channel_send(struct channel *channel, const struct outgoing_message *message) {
  struct counters *counters = &channel->engine->counters;
  uint32_t sequence = channel->sent + 1;
  char *slot = channel->send_slots + (uint64_t)channel->send_slot * channel->slot_bytes;
  struct wire_header *header = (struct wire_header *)slot;
  *header = (struct wire_header){
      .magic = WIRE_MAGIC,
      .kind = (uint8_t)message->kind,
      .flags = message->descriptor ? WIRE_FIRST : 0,
      .sequence = sequence,
      .stream = message->stream,
      .offset = message->offset,
      .length = message->length,
  };
  write_news(channel->peer, header);
  uint32_t before = sizeof *header;
  if (message->descriptor) {
    memcpy(slot + before, message->descriptor, sizeof *message->descriptor);
    before += sizeof *message->descriptor;
  }
  if (message->length) memcpy(slot + before, message->payload, message->length);

  struct ibv_sge sge = {.addr = (uintptr_t)slot, .length = before + message->length, .lkey = channel->lkey};
  /* A signaled message twice a window is enough: acknowledgements free the slots, completions only the
   * send queue. Errors complete in any case. */
  bool signaled = sequence % (channel->slots / 2) == 0;
  struct ibv_send_wr request = {.wr_id = engine_wr_id(channel, true, sequence),
                                .sg_list = &sge,
                                .num_sge = 1,
                                .opcode = IBV_WR_SEND,
                                .send_flags = signaled ? IBV_SEND_SIGNALED : 0},
                     *bad;
  int error = ibv_post_send(channel->qp, &request, &bad);
  if (error) return fail_verb(channel, "post_send", error);
  channel->sent = sequence;
  channel->send_slot = (channel->send_slot + 1) % channel->slots;
  if (message->kind != WIRE_ACK) channel->sent_data = sequence;
  count(&counters->post_send_calls, 1);
  count(&counters->messages_sent, 1);
  if (message->kind != WIRE_DATA) count(&counters->control_messages_sent, 1);
  count(&counters->header_bytes_sent, before + (message->kind == WIRE_DATA ? 0 : message->length));
  count(&counters->payload_bytes_sent, message->kind == WIRE_DATA ? message->length : 0);
  count(&counters->bytes_copied, message->length);
  return MLXDIST_OK;
}

static void view(const struct channel *channel, uint32_t slot, struct message *message) {
  const char *bytes = channel->receive_slots + (uint64_t)slot * channel->slot_bytes;
  message->header = (const struct wire_header *)bytes;
  bytes += sizeof *message->header;
  message->descriptor = 0;
  if (message->header->flags & WIRE_FIRST) {
    message->descriptor = (const struct wire_descriptor *)bytes;
    bytes += sizeof *message->descriptor;
  }
  message->payload = bytes;
}

bool channel_head(const struct channel *channel, struct message *message) {
  if (channel->arrived_count == 0) return false;
  view(channel, channel->arrived[channel->arrived_first], message);
  return true;
}

int channel_release(struct channel *channel) {
  uint32_t slot = channel->arrived[channel->arrived_first];
  channel->arrived_first = (channel->arrived_first + 1) % channel->slots;
  channel->arrived_count--;
  return post_receive(channel, slot);
}

void channel_on_sent(struct channel *channel, uint32_t sequence) { channel->completed = sequence; }

/* Refuses what no correct peer sends. The bytes come from another process: nothing in them is used before. */
static int check_message(const struct channel *channel, const struct message *message, uint32_t bytes) {
  const struct wire_header *header = message->header;
  int32_t from = channel->peer->rank, rank = channel->engine->rank;
  if (bytes < sizeof *header || header->magic != WIRE_MAGIC)
    return fail(MLXDIST_TRANSPORT, "rank %d received %u bytes from rank %d that are no message of mlxdist; "
                "do all ranks run the same version?", rank, bytes, from);
  if (header->sequence != channel->received + 1)
    return fail(MLXDIST_TRANSPORT, "rank %d lost message %u of its %s queue pair from rank %d: the next to arrive was "
                "%u", rank, channel->received + 1, channel_name(channel), from, header->sequence);
  uint64_t before = (uint64_t)(message->payload - (const char *)header);
  if (before + header->length != bytes || bytes > channel->slot_bytes || header->group != 0 ||
      header->kind < WIRE_DATA || header->kind > WIRE_ABORT)
    return fail(MLXDIST_TRANSPORT, "rank %d received message %u from rank %d with a wrong header: %u bytes, "
                "kind %u, length %u", rank, header->sequence, from, bytes, header->kind, header->length);
  for (int i = 0; i < WIRE_CHANNELS; i++) {
    const struct channel *other = &channel->peer->channels[i];
    if (!wire_at_least(other->sent, header->ack[i]) || !wire_at_least(header->ack[i] + other->slots, header->credit[i]))
      return fail(MLXDIST_TRANSPORT, "rank %d received message %u from rank %d that acknowledges what was never sent",
                  rank, header->sequence, from);
  }
  return MLXDIST_OK;
}

/* Does not end the operation in progress by itself: the peer may have failed in a later one, and then what it
 * sent before is all that is missing here, and the result is what the others have (exchange.c). */
static void take_abort(struct channel *channel, const struct message *message) {
  struct wire_abort abort = {.status = MLXDIST_ABORTED};
  char text[ERROR_TEXT_BYTES];
  int length = (int)message->header->length - (int)sizeof abort;
  if (length >= 0) memcpy(&abort, message->payload, sizeof abort);
  if (abort.status <= MLXDIST_OK || abort.status > MLXDIST_RESOURCES) abort.status = MLXDIST_ABORTED;
  if (length > 0) snprintf(text, sizeof text, "%.*s", length, message->payload + sizeof abort);
  else snprintf(text, sizeof text, "rank %d has failed", channel->peer->rank);
  failure_set(&channel->engine->failure, abort.status, text);
  channel->peer->failed = true;
  channel->peer->streams_done_there = message->header->stream;
}

int channel_on_received(struct channel *channel, uint32_t slot, uint32_t bytes) {
  struct counters *counters = &channel->engine->counters;
  count(&counters->messages_received, 1);
  count(&counters->receives_posted, (uint64_t)-1);
  struct message message;
  view(channel, slot, &message);
  int status = check_message(channel, &message, bytes);
  if (status) return status;
  channel->received++;
  read_news(channel->peer, message.header);
  if (message.header->kind == WIRE_ABORT) take_abort(channel, &message);
  if (message.header->kind != WIRE_DATA) return post_receive(channel, slot);
  count(&counters->payload_bytes_received, message.header->length);
  channel->arrived[(channel->arrived_first + channel->arrived_count) % channel->slots] = slot;
  channel->arrived_count++;
  return MLXDIST_OK;
}

bool channel_owes_news(const struct channel *channel, bool lazily) {
  uint32_t share = lazily ? channel->slots - channel->slots / 4 : channel->slots / 2;
  if (channel->received - channel->told_ack >= share || channel->posted - channel->told_credit >= share) return true;
  /* The peer is down to the slots for control messages: without news it could not even acknowledge. */
  return channel->index == WIRE_EAGER && channel->posted != channel->told_credit &&
         !wire_at_least(channel->told_credit, channel->received + CHANNEL_CONTROL_SLOTS + 1);
}
