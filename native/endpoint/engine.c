#include "engine.h"

#include "wc_status.h"

#include <errno.h>
#include <string.h>

#define POLL_BATCH 16

static int open_device(struct engine *engine) {
  const struct verbs *verbs = engine->verbs;
  int devices = 0;
  struct ibv_device **list = verbs->get_device_list(&devices);
  if (!list || devices == 0) return fail(MLXDIST_RESOURCES, "provider %s lists no device", verbs->name);
  engine->context = verbs->open_device(list[0]);
  int error = errno;
  verbs->free_device_list(list);
  if (!engine->context)
    return fail(MLXDIST_RESOURCES, "provider %s cannot open its device: %s", verbs->name, strerror(error));
  error = verbs->query_port(engine->context, 1, &engine->port);
  if (!error && engine->port.state != IBV_PORT_ACTIVE) error = ENETDOWN;
  if (!error) error = verbs->query_gid(engine->context, 1, 0, &engine->gid);
  if (error) return fail(MLXDIST_RESOURCES, "port 1 of provider %s is unusable: %s", verbs->name, strerror(error));
  return MLXDIST_OK;
}

int engine_open(struct engine *engine) {
  engine->verbs = verbs_choose();
  int status = open_device(engine);
  if (status) return status;
  engine->pd = engine->verbs->alloc_pd(engine->context);
  if (!engine->pd) return fail(MLXDIST_RESOURCES, "alloc_pd failed: %s", strerror(errno));
  /* Each channel has at most its receives, and two windows of sends, outstanding. */
  int entries = 3 * (int)(engine->options.eager_slots + engine->options.bulk_slots) * (engine->size - 1);
  engine->cq = engine->verbs->create_cq(engine->context, entries, 0, 0, 0);
  if (!engine->cq) return fail(MLXDIST_RESOURCES, "create_cq of %d entries failed: %s", entries, strerror(errno));
  for (int32_t rank = 0; rank < engine->size && !status; rank++)
    if (rank != engine->rank) status = peer_create(&engine->peers[rank], engine, rank);
  return status;
}

void engine_close(struct engine *engine) {
  for (int32_t rank = 0; rank < engine->size; rank++)
    if (rank != engine->rank) peer_destroy(&engine->peers[rank], engine);
  if (engine->cq) engine->verbs->destroy_cq(engine->cq);
  if (engine->pd) engine->verbs->dealloc_pd(engine->pd);
  if (engine->context) engine->verbs->close_device(engine->context);
  engine->cq = 0;
  engine->pd = 0;
  engine->context = 0;
}

static int take_completion(struct engine *engine, const struct ibv_wc *wc) {
  bool send = wc->wr_id >> 63;
  int32_t rank = (int32_t)(wc->wr_id >> 32 & 0xffff);
  uint32_t index = (uint32_t)(wc->wr_id >> 48 & 1), number = (uint32_t)wc->wr_id;
  if (wc->status != IBV_WC_SUCCESS)
    return fail(MLXDIST_TRANSPORT, "%s between rank %d and rank %d completed with %s", send ? "a send" : "a receive",
                engine->rank, rank, verbs_wc_status_name(wc->status));
  struct channel *channel = &engine->peers[rank].channels[index];
  if (!send) return channel_on_received(channel, number, wc->byte_len);
  channel_on_sent(channel, number);
  return MLXDIST_OK;
}

int engine_poll(struct engine *engine, bool *moved) {
  struct ibv_wc completions[POLL_BATCH];
  int n = ibv_poll_cq(engine->cq, POLL_BATCH, completions);
  count(&engine->counters.poll_cq_calls, 1);
  if (n < 0) return fail(MLXDIST_TRANSPORT, "poll_cq of rank %d failed", engine->rank);
  for (int i = 0; i < n; i++) {
    int status = take_completion(engine, &completions[i]);
    if (status) return status;
  }
  if (n > 0) *moved = true;
  return MLXDIST_OK;
}

int engine_acknowledge(struct engine *engine, bool lazily) {
  for (int32_t rank = 0; rank < engine->size; rank++) {
    if (!engine->peers[rank].connected) continue;
    int status = peer_acknowledge(&engine->peers[rank], lazily);
    if (status) return status;
  }
  return MLXDIST_OK;
}

int engine_idle(struct engine *engine, struct waiting *wait, double *waited) {
  int status = failure_check(&engine->failure);
  if (!status) status = engine_acknowledge(engine, false);
  if (!status) *waited = (double)wait_turn(wait) * 1e-9;
  return status;
}

int engine_fail(struct engine *engine, int status) {
  char message[sizeof(struct wire_abort) + ERROR_TEXT_BYTES];
  struct wire_abort abort = {.status = status};
  memcpy(message, &abort, sizeof abort);
  const char *text = mlxdist_last_error();
  size_t length = strnlen(text, ERROR_TEXT_BYTES);
  memcpy(message + sizeof abort, text, length);
  if (!failure_set(&engine->failure, status, text)) return failure_check(&engine->failure);
  for (int32_t rank = 0; rank < engine->size; rank++) {
    struct peer *peer = &engine->peers[rank];
    struct channel *eager = &peer->channels[WIRE_EAGER];
    if (!peer->connected || !channel_can_send(eager, WIRE_ABORT)) continue;
    /* A peer that cannot be told this way learns it from the side channel. */
    (void)channel_send(eager, &(struct outgoing_message){.kind = WIRE_ABORT,
                                                         .stream = peer->streams_done,
                                                         .payload = message,
                                                         .length = (uint32_t)(sizeof abort + length)});
  }
  return failure_check(&engine->failure);
}

/* Whether this rank may leave as far as `peer` is concerned: it has confirmed all data, and was told all that
 * it waits for. Tells it if it can. */
static int settle(struct peer *peer, bool *settled) {
  struct channel *eager = &peer->channels[WIRE_EAGER];
  bool owes = false;
  for (int i = 0; i < WIRE_CHANNELS; i++) owes |= peer->channels[i].received != peer->channels[i].told_ack;
  bool tell = owes && channel_can_send(eager, WIRE_ACK);
  *settled = peer_has_everything(peer) && (!owes || tell);
  return tell ? channel_send(eager, &(struct outgoing_message){.kind = WIRE_ACK}) : MLXDIST_OK;
}

int engine_drain(struct engine *engine) {
  struct waiting wait = {0};
  for (;;) {
    int32_t behind = -1;
    int status = MLXDIST_OK;
    bool moved = false;
    double waited = 0;
    for (int32_t rank = 0; rank < engine->size && !status; rank++) {
      bool settled = true;
      if (engine->peers[rank].connected) status = settle(&engine->peers[rank], &settled);
      if (!settled) behind = rank;
    }
    if (status || behind < 0) return status;
    status = engine_poll(engine, &moved);
    if (!status && moved) wait_over(&wait);
    if (!status && !moved) status = engine_idle(engine, &wait, &waited);
    if (!status && engine->options.timeout > 0 && waited > engine->options.timeout)
      status = fail(MLXDIST_TIMEOUT, "rank %d waited %.1f s at the end for rank %d to confirm what it was sent",
                    engine->rank, waited, behind);
    if (status) return status;
  }
}
