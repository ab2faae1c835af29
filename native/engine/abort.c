#include "abort.h"

#include "credit.h"
#include "error.h"
#include "layout.h"
#include "operation.h"

#include <stdio.h>
#include <string.h>

void engine_end_all(struct engine *engine) {
  engine->ended = true;
  while (engine->active) operation_end(engine->active, failure_check(&engine->failure));
}

/* The place of an operation as `peer` knows it: of a message, that of what goes there. */
static bool is_known_to(const struct operation *operation, const struct peer *peer, uint32_t *place) {
  *place = operation_is_collective(operation) ? operation->place : operation->send_place;
  return operation_is_collective(operation) ||
         (operation->out.count && operation->out.list[0].group_peer->peer == peer);
}

/* The first operation of the group, of the same kind, that has not ended well: all before it is well. */
static uint32_t first_failed(const struct operation *failed, const struct peer *peer) {
  const mlxdist_group *group = failed->group;
  bool collective = operation_is_collective(failed);
  const struct places *places = &group->peers[group->member_of[peer->endpoint.rank]].sends;
  uint32_t first = place_on_wire((collective ? group->collectives.taken : places->taken) + 1), place;
  for (const struct operation *operation = group->engine->active; operation; operation = operation->next)
    if (operation->group == group && operation_is_collective(operation) == collective &&
        is_known_to(operation, peer, &place) && !wire_at_least(place, first))
      first = place;
  return first;
}

/* A peer that cannot hear of it this way does so by the side channel. */
static void send_abort(struct peer *peer, const struct operation *operation, const char *message, uint32_t length) {
  int32_t rank = peer->endpoint.rank;
  struct channel *eager = endpoint_eager(&peer->endpoint);
  if (!peer->endpoint.usable || !channel_can_send(eager, WIRE_ABORT)) return;
  const mlxdist_group *world = engine_group(peer->engine, 0);
  struct outgoing_message abort = {
      .kind = WIRE_ABORT, .place = place_on_wire(world->collectives.taken + 1), .payload = message, .length = length};
  if (operation && operation->group->member_of[rank] >= 0) {
    abort.group = operation->group->id;
    abort.index = operation_is_collective(operation) ? 0 : WIRE_MESSAGE;
    abort.place = first_failed(operation, peer);
  }
  (void)channel_send(eager, &abort);
}

/* Every error says where it happened. */
static void locate(const struct engine *engine, const struct operation *operation) {
  char text[ERROR_TEXT_BYTES], where[ERROR_TEXT_BYTES / 2];
  snprintf(where, sizeof where, "rank %d on %s%s%s", engine->rank, engine->host, operation ? " in " : "",
           operation ? layout_name(&operation->receives, operation->sequence).text : "");
  snprintf(text, sizeof text, "%.*s", (int)(sizeof text - strlen(where) - 4), mlxdist_last_error());
  fail(MLXDIST_OK, "%s [%s]", text, where);
}

void engine_fail(struct engine *engine, const struct operation *operation, int status) {
  locate(engine, operation);
  engine_fail_all(engine, operation, status);
}

void engine_fail_all(struct engine *engine, const struct operation *operation, int status) {
  char message[sizeof(struct wire_abort) + ERROR_TEXT_BYTES];
  struct wire_abort abort = {.status = status};
  memcpy(message, &abort, sizeof abort);
  const char *text = mlxdist_last_error();
  size_t length = strnlen(text, ERROR_TEXT_BYTES);
  memcpy(message + sizeof abort, text, length);
  if (failure_set(&engine->failure, status, text))
    for (int32_t rank = 0; rank < engine->size; rank++)
      send_abort(&engine->peers[rank], operation, message, (uint32_t)(sizeof abort + length));
  engine_end_all(engine);
}

void abort_receive(struct peer *peer, const struct recv_desc *desc) {
  const struct wire_header *header = recv_header(desc);
  struct wire_abort abort = {.status = MLXDIST_ABORTED};
  char text[ERROR_TEXT_BYTES] = "";
  int length = (int)header->length - (int)sizeof abort;
  if (length >= 0) memcpy(&abort, recv_payload(desc), sizeof abort);
  if (abort.status <= MLXDIST_OK || abort.status > MLXDIST_RESOURCES) abort.status = MLXDIST_ABORTED;
  if (length > 0) snprintf(text, sizeof text, "%.*s", length, recv_payload(desc) + sizeof abort);
  if (!text[0]) snprintf(text, sizeof text, "rank %d has failed", peer->endpoint.rank);
  failure_set(&peer->engine->failure, abort.status, text);
  peer->failed = true;
  peer->failed_group = header->group;
  peer->failed_in_message = header->index == WIRE_MESSAGE;
  peer->failed_from = header->place;
}
