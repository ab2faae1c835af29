#include "wc_status.h"

const char *verbs_wc_status_name(enum ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS: return "SUCCESS: the work request completed";
    case IBV_WC_LOC_LEN_ERR:
      return "LOC_LEN_ERR: the message was longer than the posted receive, or than the port allows";
    case IBV_WC_LOC_QP_OP_ERR: return "LOC_QP_OP_ERR: the queue pair does not allow this operation";
    case IBV_WC_LOC_EEC_OP_ERR: return "LOC_EEC_OP_ERR: the end-to-end context does not allow this operation";
    case IBV_WC_LOC_PROT_ERR:
      return "LOC_PROT_ERR: a buffer lies outside the memory region of its key, or the region forbids the access";
    case IBV_WC_WR_FLUSH_ERR:
      return "WR_FLUSH_ERR: the queue pair was in the error state, so the work request was not carried out";
    case IBV_WC_MW_BIND_ERR: return "MW_BIND_ERR: a memory window could not be bound";
    case IBV_WC_BAD_RESP_ERR: return "BAD_RESP_ERR: the peer answered with an opcode that does not fit the request";
    case IBV_WC_LOC_ACCESS_ERR:
      return "LOC_ACCESS_ERR: a write with immediate data met a receive whose memory could not be written";
    case IBV_WC_REM_INV_REQ_ERR:
      return "REM_INV_REQ_ERR: the peer found the message invalid, or longer than its receive";
    case IBV_WC_REM_ACCESS_ERR: return "REM_ACCESS_ERR: the peer's memory region forbids this access";
    case IBV_WC_REM_OP_ERR: return "REM_OP_ERR: the peer could not complete the operation";
    case IBV_WC_RETRY_EXC_ERR:
      return "RETRY_EXC_ERR: the peer did not acknowledge; it is dead, or the link between is cut";
    case IBV_WC_RNR_RETRY_EXC_ERR: return "RNR_RETRY_EXC_ERR: the peer posted no receive while the message was retried";
    case IBV_WC_LOC_RDD_VIOL_ERR: return "LOC_RDD_VIOL_ERR: the reliable datagram domains of the two queues differ";
    case IBV_WC_REM_INV_RD_REQ_ERR: return "REM_INV_RD_REQ_ERR: the peer found the reliable datagram invalid";
    case IBV_WC_REM_ABORT_ERR: return "REM_ABORT_ERR: the peer aborted the operation";
    case IBV_WC_INV_EECN_ERR: return "INV_EECN_ERR: the end-to-end context number is invalid";
    case IBV_WC_INV_EEC_STATE_ERR: return "INV_EEC_STATE_ERR: the end-to-end context is in the wrong state";
    case IBV_WC_FATAL_ERR: return "FATAL_ERR: the device failed";
    case IBV_WC_RESP_TIMEOUT_ERR: return "RESP_TIMEOUT_ERR: the peer did not respond in time";
    case IBV_WC_GENERAL_ERR: return "GENERAL_ERR: the transport failed in a way that has no status of its own";
    case IBV_WC_TM_ERR: return "TM_ERR: tag matching failed";
    case IBV_WC_TM_RNDV_INCOMPLETE:
      return "TM_RNDV_INCOMPLETE: a tag-matched rendezvous message needs its data fetched";
  }
  return "unknown status: the provider wrote a value that the verbs interface does not define";
}
