#include "peer_probe.h"

#include "debug.h"
#include "error.h"
#include "frames.h"
#include "queue_pair.h"
#include "receive.h"
#include "steady_clock.h"
#include "thread.h"
#include "wc_status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Five sizes are tried at most, so all of it waits 50 ms at most. */
#define WAIT_NS 10000000u

/* Of a size: an unreliable connection may lose one. */
#define MESSAGES 3u

#define POLL_BATCH 16

/* Only what fails first is a reason. Of `why` that counts which is before a colon. */
static void trial_fail(struct probe_trial *trial, const char *call, const char *why) {
  int most = (int)(sizeof trial->failed - 1 - strlen(call)), length = (int)strcspn(why, ":");
  if (*trial->failed) return;
  snprintf(trial->failed, sizeof trial->failed, "%s%.*s", call, length < most ? length : most, why);
}

/* --- What is sent: no two messages have the same word in the same place */

static uint32_t word_of(uint32_t bytes, uint32_t number, uint32_t index) {
  return (bytes + number) * 2654435761u + index * 40503u;
}

static void write_message(char *to, uint32_t bytes, uint32_t number) {
  for (uint32_t i = 0; i < bytes / sizeof i; i++) {
    uint32_t word = word_of(bytes, number, i);
    memcpy(to + i * sizeof word, &word, sizeof word);
  }
}

/* Whether `at` has `length` bytes of a message, from `begin` on. */
static bool has_message(const char *at, uint32_t bytes, uint32_t number, uint32_t begin, uint32_t length) {
  for (uint32_t i = 0; i < length / sizeof i; i++) {
    uint32_t word = word_of(bytes, number, begin / (uint32_t)sizeof i + i);
    if (memcmp(at + i * sizeof word, &word, sizeof word) != 0) return false;
  }
  return true;
}

static void send_message(struct channel *channel, struct probe_trial *trial, uint32_t number, uint32_t bytes) {
  char *memory = channel_send_slot(channel, number);
  write_message(memory, bytes, number);
  struct ibv_sge list = {.addr = (uintptr_t)memory, .length = bytes, .lkey = channel->lkey};
  struct ibv_send_wr request = {.wr_id = channel_wr_id(channel, true, number),
                                .sg_list = &list,
                                .num_sge = 1,
                                .opcode = IBV_WR_SEND,
                                .send_flags = IBV_SEND_SIGNALED},
                     *bad;
  int error = ibv_post_send(channel->qp, &request, &bad);
  if (error) trial_fail(trial, "post_send: ", strerror(error));
}

/* --- The messages of a channel. The bulk one has those that fill its receives. The eager one, with receives of a
 * frame, has empty messages and then those of a frame: which receive the first of these takes shows whether the former
 * are lost, and nothing has to be waited for. Later, hence only where larger receives have failed, it has one of two
 * frames: it may break the queue pair, and on Apple's devices memory cannot be unmapped after that. */

static bool is_first(const struct mlxdist_peer_probe *probe) { return probe->round == 1; }

static void send_eager(const struct mlxdist_peer_probe *probe, struct channel *channel, struct probe_trial *trial) {
  if (!is_first(probe)) {
    send_message(channel, trial, 0, 2 * FRAME_BYTES);
    return;
  }
  for (uint32_t number = 0; number < MESSAGES; number++) send_message(channel, trial, number, 0);
  for (uint32_t number = 0; number < MESSAGES; number++) send_message(channel, trial, number, FRAME_BYTES);
}

static void send_bulk(struct channel *channel, struct probe_trial *trial) {
  for (uint32_t number = 0; number < MESSAGES; number++) send_message(channel, trial, number, channel->slot_bytes);
}

/* Which one of those of `bytes` bytes it is, all of it; MESSAGES: none. */
static uint32_t which(const char *at, uint32_t bytes) {
  uint32_t number = 0;
  while (number < MESSAGES && !has_message(at, bytes, number, 0, bytes)) number++;
  return number;
}

static void take_eager(const struct mlxdist_peer_probe *probe, struct probe_trial *trial, const char *bytes,
                       const struct ibv_wc *wc) {
  if (!is_first(probe)) { /* the completion of a part that others follow has an error */
    for (uint32_t part = 0; part < 2; part++)
      if (has_message(bytes, 2 * FRAME_BYTES, 0, part * FRAME_BYTES, FRAME_BYTES)) trial->parts |= 1u << part;
    return;
  }
  uint32_t number = which(bytes, FRAME_BYTES), receive = (uint32_t)wc->wr_id;
  bool is_frame = wc->status == IBV_WC_SUCCESS && number < MESSAGES;
  if (is_frame && !trial->whole++) trial->empty = receive > number;
  if (is_frame && wc->byte_len != FRAME_BYTES) trial->lengths = false;
}

static void take_bulk(const struct channel *channel, struct probe_trial *trial, const char *bytes,
                      const struct ibv_wc *wc) {
  bool arrived = wc->status == IBV_WC_SUCCESS && which(bytes, channel->slot_bytes) < MESSAGES;
  if (wc->status == IBV_WC_SUCCESS && !arrived) trial_fail(trial, "", "other bytes than were sent");
  trial->whole += arrived;
  if (arrived && wc->byte_len != channel->slot_bytes) trial->lengths = false;
}

/* Whether nothing more of it is worth waiting for. */
static bool is_over(const struct mlxdist_peer_probe *probe, const struct channel *channel,
                    const struct probe_trial *trial) {
  if (channel_kind(channel) == WIRE_BULK) return *trial->failed || trial->completed >= MESSAGES;
  return is_first(probe) ? *trial->failed || trial->whole : trial->completed >= 2;
}

static void take(struct mlxdist_peer_probe *probe, const struct ibv_wc *wc) {
  uint32_t rank = wc->wr_id >> 32 & 0xffff, index = wc->wr_id >> 48 & (WIRE_CHANNELS - 1);
  const struct channel *channel = &probe->endpoints[rank].channels[index];
  struct probe_trial *trial = &probe->trials[rank][index];
  if (!channel->qp || wc->qp_num != channel->qp->qp_num) return; /* of an earlier round */
  bool is_send = wc->wr_id >> 63;                                /* whose completion says nothing of the peer */
  if (wc->status != IBV_WC_SUCCESS) trial_fail(trial, is_send ? "SEND: " : "", verbs_wc_status_name(wc->status));
  if (is_send) return;
  const char *bytes = channel->recv_descs[(uint32_t)wc->wr_id].bytes;
  trial->completed++;
  if (channel_kind(channel) == WIRE_BULK)
    take_bulk(channel, trial, bytes, wc);
  else
    take_eager(probe, trial, bytes, wc);
}

/* Whether something has completed. */
static bool poll_all(struct mlxdist_peer_probe *probe) {
  struct ibv_wc completions[POLL_BATCH];
  bool polled = false;
  for (uint32_t i = 0; i < probe->transport.device_count; i++) {
    int n = ibv_poll_cq(probe->transport.devices[i].cq, POLL_BATCH, completions);
    for (int k = 0; k < n; k++) take(probe, &completions[k]);
    polled |= n > 0;
  }
  return polled;
}

static bool all_over(const struct mlxdist_peer_probe *probe) {
  for (int32_t rank = 0; rank < probe->transport.size; rank++)
    for (uint32_t i = 0; i < probe->endpoints[rank].channel_count; i++)
      if (!is_over(probe, &probe->endpoints[rank].channels[i], &probe->trials[rank][i])) return false;
  return true;
}

static void explain(const struct probe_trial *trial, char text[MLXDIST_PEER_PROBE_FAILURE]) {
  snprintf(text, MLXDIST_PEER_PROBE_FAILURE, "%s", *trial->failed ? trial->failed : "nothing arrives");
}

static void find(const struct mlxdist_peer_probe *probe, const struct endpoint *endpoint, uint32_t link,
                 mlxdist_peer_finding *finding) {
  const struct probe_trial *eager = &probe->trials[endpoint->rank][2ull * link], *bulk = eager + 1;
  const struct channel *channel = &endpoint->channels[2 * link + WIRE_BULK];
  *finding = (mlxdist_peer_finding){.arrives = bulk->whole > 0 && !*bulk->failed,
                                    .receives = (int32_t)channel->slots,
                                    .empty = eager->empty,
                                    .lengths = bulk->lengths && eager->lengths,
                                    .packets = eager->parts == 3};
  if (!finding->arrives) explain(bulk, finding->failed);
  if (!is_first(probe) && !finding->packets) explain(eager, finding->longer);
}

/* --- Its life */

static void destroy_endpoints(struct mlxdist_peer_probe *probe) {
  for (int32_t rank = 0; rank < probe->transport.size; rank++) endpoint_destroy_channels(&probe->endpoints[rank]);
  for (int32_t rank = 0; rank < probe->transport.size; rank++) {
    endpoint_free_memory(&probe->endpoints[rank]);
    probe->endpoints[rank].channel_count = 0;
  }
  while (poll_all(probe)) continue;
}

void mlxdist_peer_probe_close(mlxdist_peer_probe *probe) {
  if (!probe) return;
  if (probe->transport.devices) transport_close(&probe->transport);
  free(probe->endpoints);
  free(probe->by_rank);
  free(probe->trials);
  free(probe);
}

static bool allocate(struct mlxdist_peer_probe *probe, size_t size) {
  probe->endpoints = calloc(size, sizeof *probe->endpoints);
  probe->by_rank = calloc(size, sizeof(struct endpoint *));
  probe->trials = calloc(size, sizeof *probe->trials);
  if (!probe->endpoints || !probe->by_rank || !probe->trials) return false;
  for (size_t rank = 0; rank < size; rank++) {
    probe->by_rank[rank] = &probe->endpoints[rank];
    probe->endpoints[rank] = (struct endpoint){.transport = &probe->transport, .rank = (int32_t)rank};
  }
  return true;
}

/* Completion queues have room for as many messages as there can be, those of one frame. */
static int open_transport(struct mlxdist_peer_probe *probe, const mlxdist_link *links) {
  bool reachable[MLXDIST_MAX_RANKS];
  for (int32_t rank = 0; rank < probe->transport.size; rank++)
    reachable[rank] = links[(size_t)rank * MLXDIST_MAX_LINKS].provider;
  probe->options.bulk_slots = (uint32_t)(probe->bulk_bytes / FRAME_BYTES);
  probe->options.bulk_slot_bytes = FRAME_BYTES;
  return transport_open(&probe->transport, links, reachable);
}

int mlxdist_peer_probe_open(int32_t rank, int32_t size, const mlxdist_options *options, mlxdist_peer_probe **result) {
  *result = 0;
  bool is_rank = size >= 2 && size <= MLXDIST_MAX_RANKS && rank >= 0 && rank < size;
  if (!is_rank || !options->links || options->eager_slots < 2 * MESSAGES)
    return fail(MLXDIST_INVALID_ARGUMENT, "a probe of rank %d of %d needs links to its peers, and %u eager slots", rank,
                size, 2 * MESSAGES);
  mlxdist_peer_probe *probe = calloc(1, sizeof *probe);
  if (!probe) return fail(MLXDIST_RESOURCES, "out of memory for the probe of %d ranks", size);
  probe->options = *options;
  probe->bulk_bytes = (uint64_t)options->bulk_slots * options->bulk_slot_bytes;
  bool allocated = allocate(probe, (size_t)size);
  probe->transport = (struct transport){.rank = rank,
                                        .size = size,
                                        .options = &probe->options,
                                        .counters = &probe->counters,
                                        .endpoints = probe->by_rank};
  int status = allocated ? open_transport(probe, options->links)
                         : fail(MLXDIST_RESOURCES, "out of memory for the probe of %d ranks", size);
  if (status)
    mlxdist_peer_probe_close(probe);
  else
    *result = probe;
  return status;
}

uint64_t mlxdist_peer_probe_address_size(const mlxdist_peer_probe *probe) {
  return (uint64_t)probe->transport.size * sizeof(struct endpoint_address);
}

int mlxdist_peer_probe_prepare(mlxdist_peer_probe *probe, uint32_t receive_bytes, void *addresses) {
  if (receive_bytes < FRAME_BYTES || receive_bytes > probe->bulk_bytes / MESSAGES || receive_bytes % FRAME_BYTES)
    return fail(MLXDIST_INVALID_ARGUMENT, "a probe has no receives of %u bytes", receive_bytes);
  destroy_endpoints(probe);
  probe->round++;
  probe->options.bulk_slot_bytes = receive_bytes;
  probe->options.bulk_slots = (uint32_t)(probe->bulk_bytes / receive_bytes);
  memset(addresses, 0, mlxdist_peer_probe_address_size(probe));
  for (int32_t rank = 0; rank < probe->transport.size; rank++) {
    struct endpoint *endpoint = &probe->endpoints[rank];
    for (uint32_t i = 0; i < WIRE_CHANNELS; i++) probe->trials[rank][i] = (struct probe_trial){.lengths = true};
    int status = endpoint->link_count ? endpoint_create(endpoint) : MLXDIST_OK;
    if (status) return status;
    struct endpoint_address address;
    endpoint_address(endpoint, &address);
    memcpy((char *)addresses + (size_t)rank * sizeof address, &address, sizeof address);
  }
  return MLXDIST_OK;
}

/* A queue pair that does not take all receives is a finding; one that cannot be connected is an error. */
static int connect_endpoint(struct endpoint *endpoint, const struct endpoint_address *address,
                            struct probe_trial *trials) {
  int status = endpoint_check_address(endpoint, address);
  for (uint32_t i = 0; i < endpoint->channel_count && !status; i++) {
    struct channel *channel = &endpoint->channels[i];
    status = endpoint_connect_channel(endpoint, i, address);
    if (status || !receive_post_all(channel)) continue;
    char after[32];
    snprintf(after, sizeof after, "after %u receives", channel->outstanding);
    trial_fail(&trials[i], "post_recv fails ", after);
  }
  return status;
}

int mlxdist_peer_probe_connect(mlxdist_peer_probe *probe, const void *addresses, uint64_t bytes) {
  uint64_t each = mlxdist_peer_probe_address_size(probe);
  if (bytes != each * (uint64_t)probe->transport.size)
    return fail(MLXDIST_INVALID_ARGUMENT, "addresses of %d ranks are %llu bytes, not %llu", probe->transport.size,
                (unsigned long long)each * (unsigned long long)probe->transport.size, (unsigned long long)bytes);
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < probe->transport.size && !status; rank++) {
    struct endpoint_address address;
    const char *of_rank = (const char *)addresses + each * (uint64_t)rank;
    memcpy(&address, of_rank + (size_t)probe->transport.rank * sizeof address, sizeof address);
    if (!probe->endpoints[rank].channel_count) continue;
    status = connect_endpoint(&probe->endpoints[rank], &address, probe->trials[rank]);
  }
  return status;
}

void mlxdist_peer_probe_send(mlxdist_peer_probe *probe) {
  for (int32_t rank = 0; rank < probe->transport.size; rank++) {
    for (uint32_t i = 0; i < probe->endpoints[rank].channel_count; i++) {
      struct channel *channel = &probe->endpoints[rank].channels[i];
      if (channel_kind(channel) == WIRE_BULK)
        send_bulk(channel, &probe->trials[rank][i]);
      else
        send_eager(probe, channel, &probe->trials[rank][i]);
    }
  }
}

void mlxdist_peer_probe_receive(mlxdist_peer_probe *probe, mlxdist_peer_finding *findings) {
  uint64_t begun = clock_ns(), now = begun;
  for (bool is_late = false; !is_late && !all_over(probe); now = clock_ns()) {
    is_late = now - begun > WAIT_NS; /* then once more: this thread may not have had a core */
    if (!poll_all(probe)) thread_yield();
  }
  for (int32_t rank = 0; rank < probe->transport.size; rank++) {
    const struct endpoint *endpoint = &probe->endpoints[rank];
    mlxdist_peer_finding *of_rank = &findings[(size_t)rank * MLXDIST_MAX_LINKS];
    memset(of_rank, 0, MLXDIST_MAX_LINKS * sizeof *of_rank);
    for (uint32_t link = 0; link < endpoint->channel_count / 2; link++) {
      find(probe, endpoint, link, &of_rank[link]);
      debug(DEBUG_INFO, "connection", "probe with rank %d by device %s, messages of %u bytes: %s", rank,
            endpoint->links[link].device->name, probe->options.bulk_slot_bytes,
            of_rank[link].arrives ? "they arrive" : of_rank[link].failed);
    }
  }
}
