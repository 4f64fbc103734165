// SPDX-License-Identifier: Apache-2.0
// Code generated from moec.h by generate.py; DO NOT EDIT.

//go:build cgo && !moec_purego

package raw

/*
#cgo pkg-config: moec
#include <moec/moec.h>
static uint32_t go_moec_version(void) { return moec_version(); }
static uintptr_t go_moec_version_string(void) { return (uintptr_t)moec_version_string(); }
static uint32_t go_moec_abi_version(void) { return moec_abi_version(); }
static uintptr_t go_moec_build_info(void) { return (uintptr_t)moec_build_info(); }
static uintptr_t go_moec_status_name(int32_t status) { return (uintptr_t)moec_status_name(status); }
static int32_t go_moec_last_error(void * out) { return moec_last_error(out); }
static void go_moec_struct_init(uintptr_t sized_struct, uint64_t bytes) { moec_struct_init((void *)sized_struct, bytes); }
static int32_t go_moec_set_log(uintptr_t sink, uintptr_t user, int32_t min_level) { return moec_set_log((moec_log_function)sink, (void *)user, min_level); }
static int32_t go_moec_backend_load(void * path) { return moec_backend_load(path); }
static int32_t go_moec_device_count(int32_t device_type, void * count) { return moec_device_count(device_type, count); }
static int32_t go_moec_backend_describe(int32_t device_type, void * buffer, uint64_t bytes, void * need) { return moec_backend_describe(device_type, buffer, bytes, need); }
static int32_t go_moec_device_query(int32_t device_type, int32_t device_id, void * out) { return moec_device_query(device_type, device_id, out); }
static int32_t go_moec_context_create(void * desc, void * out) { return moec_context_create(desc, out); }
static void go_moec_context_free(uintptr_t context) { moec_context_free((void *)context); }
static int32_t go_moec_context_device(uintptr_t context, void * out) { return moec_context_device((void *)context, out); }
static int32_t go_moec_context_reserve(uintptr_t context, uint64_t bytes, uintptr_t stream) { return moec_context_reserve((void *)context, bytes, (void *)stream); }
static int32_t go_moec_context_trim(uintptr_t context) { return moec_context_trim((void *)context); }
static int32_t go_moec_context_poll(uintptr_t context, void * deferred) { return moec_context_poll((void *)context, deferred); }
static int32_t go_moec_context_sync(uintptr_t context, uintptr_t stream) { return moec_context_sync((void *)context, (void *)stream); }
static int32_t go_moec_context_stats(uintptr_t context, void * out) { return moec_context_stats((void *)context, out); }
static int32_t go_moec_context_stats_reset(uintptr_t context) { return moec_context_stats_reset((void *)context); }
static int32_t go_moec_tensor_make(void * out, uintptr_t data, uint32_t dtype, int32_t device_type, int32_t device_id, int32_t ndim, void * shape) { return moec_tensor_make(out, (void *)data, dtype, device_type, device_id, ndim, shape); }
static int32_t go_moec_tensor_from_dlpack(uintptr_t dl_tensor, void * out) { return moec_tensor_from_dlpack((void *)dl_tensor, out); }
static int64_t go_moec_tensor_numel(void * tensor) { return moec_tensor_numel(tensor); }
static int64_t go_moec_tensor_bytes(void * tensor) { return moec_tensor_bytes(tensor); }
static int32_t go_moec_tensor_check(void * tensor) { return moec_tensor_check(tensor); }
static int32_t go_moec_buffer_alloc(uintptr_t context, uint64_t bytes, void * out) { return moec_buffer_alloc((void *)context, bytes, out); }
static int32_t go_moec_buffer_free(uintptr_t context, void * buffer) { return moec_buffer_free((void *)context, buffer); }
static int32_t go_moec_tensor_copy(uintptr_t context, void * source, void * target, uintptr_t stream) { return moec_tensor_copy((void *)context, source, target, (void *)stream); }
static int32_t go_moec_tensor_zero(uintptr_t context, void * tensor, uintptr_t stream) { return moec_tensor_zero((void *)context, tensor, (void *)stream); }
static int32_t go_moec_router_create(uintptr_t context, void * desc, void * out) { return moec_router_create((void *)context, desc, out); }
static void go_moec_router_free(uintptr_t router) { moec_router_free((void *)router); }
static int32_t go_moec_gate_forward(uintptr_t router, void * args, uintptr_t stream) { return moec_gate_forward((void *)router, args, (void *)stream); }
static int32_t go_moec_gate_backward(uintptr_t router, void * args, uintptr_t stream) { return moec_gate_backward((void *)router, args, (void *)stream); }
static int32_t go_moec_route_forward(uintptr_t router, void * args, uintptr_t stream) { return moec_route_forward((void *)router, args, (void *)stream); }
static int32_t go_moec_route_backward(uintptr_t router, void * args, uintptr_t stream) { return moec_route_backward((void *)router, args, (void *)stream); }
static int32_t go_moec_router_bias_update(uintptr_t router, void * counts, float rate, void * bias, uintptr_t stream) { return moec_router_bias_update((void *)router, counts, rate, bias, (void *)stream); }
static int32_t go_moec_loss_forward(uintptr_t context, void * args, uintptr_t stream) { return moec_loss_forward((void *)context, args, (void *)stream); }
static int32_t go_moec_loss_backward(uintptr_t context, void * args, uintptr_t stream) { return moec_loss_backward((void *)context, args, (void *)stream); }
static int32_t go_moec_plan_size(void * desc, void * bytes, void * max_rows) { return moec_plan_size(desc, bytes, max_rows); }
static int32_t go_moec_plan_create(uintptr_t context, void * desc, void * memory, void * out) { return moec_plan_create((void *)context, desc, memory, out); }
static void go_moec_plan_free(uintptr_t plan) { moec_plan_free((void *)plan); }
static int32_t go_moec_plan_from_topk(uintptr_t plan, void * expert_ids, void * routing_weights, uintptr_t stream) { return moec_plan_from_topk((void *)plan, expert_ids, routing_weights, (void *)stream); }
static int32_t go_moec_plan_from_logits(uintptr_t plan, uintptr_t router, void * args, uintptr_t stream) { return moec_plan_from_logits((void *)plan, (void *)router, args, (void *)stream); }
static int32_t go_moec_plan_from_map(uintptr_t plan, void * routing_map, void * probs, uintptr_t stream) { return moec_plan_from_map((void *)plan, routing_map, probs, (void *)stream); }
static int32_t go_moec_plan_from_rule(uintptr_t plan, uint32_t rule, int64_t num_tokens, void * routing_weights, uintptr_t stream) { return moec_plan_from_rule((void *)plan, rule, num_tokens, routing_weights, (void *)stream); }
static int32_t go_moec_plan_from_scores(uintptr_t plan, void * scores, void * token_mask, uintptr_t stream) { return moec_plan_from_scores((void *)plan, scores, token_mask, (void *)stream); }
static int32_t go_moec_plan_attach(uintptr_t plan, int64_t num_tokens) { return moec_plan_attach((void *)plan, num_tokens); }
static int32_t go_moec_plan_view(uintptr_t plan, int32_t field, void * out) { return moec_plan_view((void *)plan, field, out); }
static int32_t go_moec_plan_export(uintptr_t plan, int32_t field, void * dst, uintptr_t stream) { return moec_plan_export((void *)plan, field, dst, (void *)stream); }
static int32_t go_moec_plan_totals_sync(uintptr_t plan, void * totals, uintptr_t stream) { return moec_plan_totals_sync((void *)plan, totals, (void *)stream); }
static int32_t go_moec_plan_save_sync(uintptr_t plan, uintptr_t buffer, uint64_t bytes, void * need, uintptr_t stream) { return moec_plan_save_sync((void *)plan, (void *)buffer, bytes, need, (void *)stream); }
static int32_t go_moec_plan_restore_sync(uintptr_t plan, uintptr_t buffer, uint64_t bytes, uintptr_t stream) { return moec_plan_restore_sync((void *)plan, (void *)buffer, bytes, (void *)stream); }
static int32_t go_moec_permute(uintptr_t context, void * args, uintptr_t stream) { return moec_permute((void *)context, args, (void *)stream); }
static int32_t go_moec_unpermute(uintptr_t context, void * args, uintptr_t stream) { return moec_unpermute((void *)context, args, (void *)stream); }
static int32_t go_moec_permute_backward(uintptr_t context, void * args, uintptr_t stream) { return moec_permute_backward((void *)context, args, (void *)stream); }
static int32_t go_moec_unpermute_backward(uintptr_t context, void * args, uintptr_t stream) { return moec_unpermute_backward((void *)context, args, (void *)stream); }
static int32_t go_moec_weights_create(uintptr_t context, void * desc, void * out) { return moec_weights_create((void *)context, desc, out); }
static void go_moec_weights_free(uintptr_t weights) { moec_weights_free((void *)weights); }
static int32_t go_moec_weights_bind(uintptr_t weights, void * set) { return moec_weights_bind((void *)weights, set); }
static int32_t go_moec_weights_query(uintptr_t weights, void * out) { return moec_weights_query((void *)weights, out); }
static int32_t go_moec_weights_pack(uintptr_t weights, void * memory, uintptr_t stream) { return moec_weights_pack((void *)weights, memory, (void *)stream); }
static int32_t go_moec_weights_refresh(uintptr_t weights, int32_t first, int32_t count, uintptr_t stream) { return moec_weights_refresh((void *)weights, first, count, (void *)stream); }
static int32_t go_moec_weights_dequantise(uintptr_t weights, uint32_t matrix, int32_t expert, void * to, uintptr_t stream) { return moec_weights_dequantise((void *)weights, matrix, expert, to, (void *)stream); }
static int32_t go_moec_weights_release_source(uintptr_t weights) { return moec_weights_release_source((void *)weights); }
static int32_t go_moec_weights_unpack(uintptr_t weights, void * to, uintptr_t stream) { return moec_weights_unpack((void *)weights, to, (void *)stream); }
static int32_t go_moec_weights_save_sync(uintptr_t weights, void * path) { return moec_weights_save_sync((void *)weights, path); }
static int32_t go_moec_weights_map_sync(uintptr_t weights, void * path) { return moec_weights_map_sync((void *)weights, path); }
static int32_t go_moec_quantise_query(uintptr_t context, void * desc, void * info, void * quant) { return moec_quantise_query((void *)context, desc, info, quant); }
static int32_t go_moec_quantise(uintptr_t context, void * args, uintptr_t stream) { return moec_quantise((void *)context, args, (void *)stream); }
static int32_t go_moec_adapters_create(uintptr_t context, void * desc, void * out) { return moec_adapters_create((void *)context, desc, out); }
static void go_moec_adapters_free(uintptr_t adapters) { moec_adapters_free((void *)adapters); }
static int32_t go_moec_adapters_bind(uintptr_t adapters, void * list, int32_t count) { return moec_adapters_bind((void *)adapters, list, count); }
static int32_t go_moec_adapters_merge(uintptr_t adapters, uintptr_t weights, uintptr_t stream) { return moec_adapters_merge((void *)adapters, (void *)weights, (void *)stream); }
static int32_t go_moec_adapters_unmerge(uintptr_t adapters, uintptr_t weights, uintptr_t stream) { return moec_adapters_unmerge((void *)adapters, (void *)weights, (void *)stream); }
static int32_t go_moec_adapters_merge_copy(uintptr_t adapters, uintptr_t weights, uint32_t matrix, void * values, void * quantised, uintptr_t stream) { return moec_adapters_merge_copy((void *)adapters, (void *)weights, matrix, values, quantised, (void *)stream); }
static int32_t go_moec_experts_create(uintptr_t context, void * desc, void * out) { return moec_experts_create((void *)context, desc, out); }
static void go_moec_experts_free(uintptr_t experts) { moec_experts_free((void *)experts); }
static int32_t go_moec_experts_query(uintptr_t experts, void * out) { return moec_experts_query((void *)experts, out); }
static int32_t go_moec_experts_query_adapters(uintptr_t experts, uintptr_t adapters, void * out) { return moec_experts_query_adapters((void *)experts, (void *)adapters, out); }
static int32_t go_moec_experts_forward(uintptr_t experts, void * args, uintptr_t stream) { return moec_experts_forward((void *)experts, args, (void *)stream); }
static int32_t go_moec_experts_backward(uintptr_t experts, void * args, uintptr_t stream) { return moec_experts_backward((void *)experts, args, (void *)stream); }
static int32_t go_moec_experts_describe(uintptr_t experts, uintptr_t weights, int64_t num_tokens, void * buffer, uint64_t bytes, void * need) { return moec_experts_describe((void *)experts, (void *)weights, num_tokens, buffer, bytes, need); }
static int32_t go_moec_layer_create(uintptr_t context, void * desc, void * out) { return moec_layer_create((void *)context, desc, out); }
static void go_moec_layer_free(uintptr_t layer) { moec_layer_free((void *)layer); }
static int32_t go_moec_layer_query(uintptr_t layer, void * out) { return moec_layer_query((void *)layer, out); }
static int32_t go_moec_layer_query_adapters(uintptr_t layer, uintptr_t adapters, void * out) { return moec_layer_query_adapters((void *)layer, (void *)adapters, out); }
static int32_t go_moec_layer_forward(uintptr_t layer, void * args, uintptr_t stream) { return moec_layer_forward((void *)layer, args, (void *)stream); }
static int32_t go_moec_layer_backward(uintptr_t layer, void * args, uintptr_t stream) { return moec_layer_backward((void *)layer, args, (void *)stream); }
static int32_t go_moec_layer_describe(uintptr_t layer, uintptr_t weights, int64_t num_tokens, void * buffer, uint64_t bytes, void * need) { return moec_layer_describe((void *)layer, (void *)weights, num_tokens, buffer, bytes, need); }
static int32_t go_moec_comm_create(uintptr_t context, void * desc, void * callbacks, void * out) { return moec_comm_create((void *)context, desc, callbacks, out); }
static void go_moec_comm_free(uintptr_t comm) { moec_comm_free((void *)comm); }
static int32_t go_moec_comm_abort(uintptr_t comm) { return moec_comm_abort((void *)comm); }
static int32_t go_moec_comm_sum(uintptr_t comm, void * in_out, uintptr_t stream) { return moec_comm_sum((void *)comm, in_out, (void *)stream); }
static int32_t go_moec_ep_create(uintptr_t comm, void * desc, void * out) { return moec_ep_create((void *)comm, desc, out); }
static void go_moec_ep_free(uintptr_t ep) { moec_ep_free((void *)ep); }
static int32_t go_moec_ep_query(uintptr_t ep, void * out) { return moec_ep_query((void *)ep, out); }
static int32_t go_moec_ep_describe(uintptr_t ep, void * buffer, uint64_t bytes, void * need) { return moec_ep_describe((void *)ep, buffer, bytes, need); }
static int32_t go_moec_ep_dispatch(uintptr_t ep, void * args, uintptr_t stream) { return moec_ep_dispatch((void *)ep, args, (void *)stream); }
static int32_t go_moec_ep_combine(uintptr_t ep, void * args, uintptr_t stream) { return moec_ep_combine((void *)ep, args, (void *)stream); }
static int32_t go_moec_ep_poll(uintptr_t ep, void * out) { return moec_ep_poll((void *)ep, out); }
*/
import "C"
import "unsafe"

func Version() uint32 { return uint32(C.go_moec_version()) }
func VersionString() uintptr { return uintptr(C.go_moec_version_string()) }
func AbiVersion() uint32 { return uint32(C.go_moec_abi_version()) }
func BuildInfo() uintptr { return uintptr(C.go_moec_build_info()) }
func StatusName(status int32) uintptr { return uintptr(C.go_moec_status_name(C.int32_t(status))) }
func LastError(out unsafe.Pointer) int32 { return int32(C.go_moec_last_error(out)) }
func StructInit(sizedStruct uintptr, bytes uint64)  { C.go_moec_struct_init(C.uintptr_t(sizedStruct), C.uint64_t(bytes)) }
func SetLog(sink uintptr, user uintptr, minLevel int32) int32 { return int32(C.go_moec_set_log(C.uintptr_t(sink), C.uintptr_t(user), C.int32_t(minLevel))) }
func BackendLoad(path unsafe.Pointer) int32 { return int32(C.go_moec_backend_load(path)) }
func DeviceCount(deviceType int32, count unsafe.Pointer) int32 { return int32(C.go_moec_device_count(C.int32_t(deviceType), count)) }
func BackendDescribe(deviceType int32, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32 { return int32(C.go_moec_backend_describe(C.int32_t(deviceType), buffer, C.uint64_t(bytes), need)) }
func DeviceQuery(deviceType int32, deviceId int32, out unsafe.Pointer) int32 { return int32(C.go_moec_device_query(C.int32_t(deviceType), C.int32_t(deviceId), out)) }
func ContextCreate(desc unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_context_create(desc, out)) }
func ContextFree(context uintptr)  { C.go_moec_context_free(C.uintptr_t(context)) }
func ContextDevice(context uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_context_device(C.uintptr_t(context), out)) }
func ContextReserve(context uintptr, bytes uint64, stream uintptr) int32 { return int32(C.go_moec_context_reserve(C.uintptr_t(context), C.uint64_t(bytes), C.uintptr_t(stream))) }
func ContextTrim(context uintptr) int32 { return int32(C.go_moec_context_trim(C.uintptr_t(context))) }
func ContextPoll(context uintptr, deferred unsafe.Pointer) int32 { return int32(C.go_moec_context_poll(C.uintptr_t(context), deferred)) }
func ContextSync(context uintptr, stream uintptr) int32 { return int32(C.go_moec_context_sync(C.uintptr_t(context), C.uintptr_t(stream))) }
func ContextStats(context uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_context_stats(C.uintptr_t(context), out)) }
func ContextStatsReset(context uintptr) int32 { return int32(C.go_moec_context_stats_reset(C.uintptr_t(context))) }
func TensorMake(out unsafe.Pointer, data uintptr, dtype uint32, deviceType int32, deviceId int32, ndim int32, shape unsafe.Pointer) int32 { return int32(C.go_moec_tensor_make(out, C.uintptr_t(data), C.uint32_t(dtype), C.int32_t(deviceType), C.int32_t(deviceId), C.int32_t(ndim), shape)) }
func TensorFromDlpack(dlTensor uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_tensor_from_dlpack(C.uintptr_t(dlTensor), out)) }
func TensorNumel(tensor unsafe.Pointer) int64 { return int64(C.go_moec_tensor_numel(tensor)) }
func TensorBytes(tensor unsafe.Pointer) int64 { return int64(C.go_moec_tensor_bytes(tensor)) }
func TensorCheck(tensor unsafe.Pointer) int32 { return int32(C.go_moec_tensor_check(tensor)) }
func BufferAlloc(context uintptr, bytes uint64, out unsafe.Pointer) int32 { return int32(C.go_moec_buffer_alloc(C.uintptr_t(context), C.uint64_t(bytes), out)) }
func BufferFree(context uintptr, buffer unsafe.Pointer) int32 { return int32(C.go_moec_buffer_free(C.uintptr_t(context), buffer)) }
func TensorCopy(context uintptr, source unsafe.Pointer, target unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_tensor_copy(C.uintptr_t(context), source, target, C.uintptr_t(stream))) }
func TensorZero(context uintptr, tensor unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_tensor_zero(C.uintptr_t(context), tensor, C.uintptr_t(stream))) }
func RouterCreate(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_router_create(C.uintptr_t(context), desc, out)) }
func RouterFree(router uintptr)  { C.go_moec_router_free(C.uintptr_t(router)) }
func GateForward(router uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_gate_forward(C.uintptr_t(router), args, C.uintptr_t(stream))) }
func GateBackward(router uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_gate_backward(C.uintptr_t(router), args, C.uintptr_t(stream))) }
func RouteForward(router uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_route_forward(C.uintptr_t(router), args, C.uintptr_t(stream))) }
func RouteBackward(router uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_route_backward(C.uintptr_t(router), args, C.uintptr_t(stream))) }
func RouterBiasUpdate(router uintptr, counts unsafe.Pointer, rate float32, bias unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_router_bias_update(C.uintptr_t(router), counts, C.float(rate), bias, C.uintptr_t(stream))) }
func LossForward(context uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_loss_forward(C.uintptr_t(context), args, C.uintptr_t(stream))) }
func LossBackward(context uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_loss_backward(C.uintptr_t(context), args, C.uintptr_t(stream))) }
func PlanSize(desc unsafe.Pointer, bytes unsafe.Pointer, maxRows unsafe.Pointer) int32 { return int32(C.go_moec_plan_size(desc, bytes, maxRows)) }
func PlanCreate(context uintptr, desc unsafe.Pointer, memory unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_plan_create(C.uintptr_t(context), desc, memory, out)) }
func PlanFree(plan uintptr)  { C.go_moec_plan_free(C.uintptr_t(plan)) }
func PlanFromTopk(plan uintptr, expertIds unsafe.Pointer, routingWeights unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_from_topk(C.uintptr_t(plan), expertIds, routingWeights, C.uintptr_t(stream))) }
func PlanFromLogits(plan uintptr, router uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_from_logits(C.uintptr_t(plan), C.uintptr_t(router), args, C.uintptr_t(stream))) }
func PlanFromMap(plan uintptr, routingMap unsafe.Pointer, probs unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_from_map(C.uintptr_t(plan), routingMap, probs, C.uintptr_t(stream))) }
func PlanFromRule(plan uintptr, rule uint32, numTokens int64, routingWeights unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_from_rule(C.uintptr_t(plan), C.uint32_t(rule), C.int64_t(numTokens), routingWeights, C.uintptr_t(stream))) }
func PlanFromScores(plan uintptr, scores unsafe.Pointer, tokenMask unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_from_scores(C.uintptr_t(plan), scores, tokenMask, C.uintptr_t(stream))) }
func PlanAttach(plan uintptr, numTokens int64) int32 { return int32(C.go_moec_plan_attach(C.uintptr_t(plan), C.int64_t(numTokens))) }
func PlanView(plan uintptr, field int32, out unsafe.Pointer) int32 { return int32(C.go_moec_plan_view(C.uintptr_t(plan), C.int32_t(field), out)) }
func PlanExport(plan uintptr, field int32, dst unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_export(C.uintptr_t(plan), C.int32_t(field), dst, C.uintptr_t(stream))) }
func PlanTotalsSync(plan uintptr, totals unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_totals_sync(C.uintptr_t(plan), totals, C.uintptr_t(stream))) }
func PlanSaveSync(plan uintptr, buffer uintptr, bytes uint64, need unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_plan_save_sync(C.uintptr_t(plan), C.uintptr_t(buffer), C.uint64_t(bytes), need, C.uintptr_t(stream))) }
func PlanRestoreSync(plan uintptr, buffer uintptr, bytes uint64, stream uintptr) int32 { return int32(C.go_moec_plan_restore_sync(C.uintptr_t(plan), C.uintptr_t(buffer), C.uint64_t(bytes), C.uintptr_t(stream))) }
func Permute(context uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_permute(C.uintptr_t(context), args, C.uintptr_t(stream))) }
func Unpermute(context uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_unpermute(C.uintptr_t(context), args, C.uintptr_t(stream))) }
func PermuteBackward(context uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_permute_backward(C.uintptr_t(context), args, C.uintptr_t(stream))) }
func UnpermuteBackward(context uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_unpermute_backward(C.uintptr_t(context), args, C.uintptr_t(stream))) }
func WeightsCreate(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_weights_create(C.uintptr_t(context), desc, out)) }
func WeightsFree(weights uintptr)  { C.go_moec_weights_free(C.uintptr_t(weights)) }
func WeightsBind(weights uintptr, set unsafe.Pointer) int32 { return int32(C.go_moec_weights_bind(C.uintptr_t(weights), set)) }
func WeightsQuery(weights uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_weights_query(C.uintptr_t(weights), out)) }
func WeightsPack(weights uintptr, memory unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_weights_pack(C.uintptr_t(weights), memory, C.uintptr_t(stream))) }
func WeightsRefresh(weights uintptr, first int32, count int32, stream uintptr) int32 { return int32(C.go_moec_weights_refresh(C.uintptr_t(weights), C.int32_t(first), C.int32_t(count), C.uintptr_t(stream))) }
func WeightsDequantise(weights uintptr, matrix uint32, expert int32, to unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_weights_dequantise(C.uintptr_t(weights), C.uint32_t(matrix), C.int32_t(expert), to, C.uintptr_t(stream))) }
func WeightsReleaseSource(weights uintptr) int32 { return int32(C.go_moec_weights_release_source(C.uintptr_t(weights))) }
func WeightsUnpack(weights uintptr, to unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_weights_unpack(C.uintptr_t(weights), to, C.uintptr_t(stream))) }
func WeightsSaveSync(weights uintptr, path unsafe.Pointer) int32 { return int32(C.go_moec_weights_save_sync(C.uintptr_t(weights), path)) }
func WeightsMapSync(weights uintptr, path unsafe.Pointer) int32 { return int32(C.go_moec_weights_map_sync(C.uintptr_t(weights), path)) }
func QuantiseQuery(context uintptr, desc unsafe.Pointer, info unsafe.Pointer, quant unsafe.Pointer) int32 { return int32(C.go_moec_quantise_query(C.uintptr_t(context), desc, info, quant)) }
func Quantise(context uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_quantise(C.uintptr_t(context), args, C.uintptr_t(stream))) }
func AdaptersCreate(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_adapters_create(C.uintptr_t(context), desc, out)) }
func AdaptersFree(adapters uintptr)  { C.go_moec_adapters_free(C.uintptr_t(adapters)) }
func AdaptersBind(adapters uintptr, list unsafe.Pointer, count int32) int32 { return int32(C.go_moec_adapters_bind(C.uintptr_t(adapters), list, C.int32_t(count))) }
func AdaptersMerge(adapters uintptr, weights uintptr, stream uintptr) int32 { return int32(C.go_moec_adapters_merge(C.uintptr_t(adapters), C.uintptr_t(weights), C.uintptr_t(stream))) }
func AdaptersUnmerge(adapters uintptr, weights uintptr, stream uintptr) int32 { return int32(C.go_moec_adapters_unmerge(C.uintptr_t(adapters), C.uintptr_t(weights), C.uintptr_t(stream))) }
func AdaptersMergeCopy(adapters uintptr, weights uintptr, matrix uint32, values unsafe.Pointer, quantised unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_adapters_merge_copy(C.uintptr_t(adapters), C.uintptr_t(weights), C.uint32_t(matrix), values, quantised, C.uintptr_t(stream))) }
func ExpertsCreate(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_experts_create(C.uintptr_t(context), desc, out)) }
func ExpertsFree(experts uintptr)  { C.go_moec_experts_free(C.uintptr_t(experts)) }
func ExpertsQuery(experts uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_experts_query(C.uintptr_t(experts), out)) }
func ExpertsQueryAdapters(experts uintptr, adapters uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_experts_query_adapters(C.uintptr_t(experts), C.uintptr_t(adapters), out)) }
func ExpertsForward(experts uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_experts_forward(C.uintptr_t(experts), args, C.uintptr_t(stream))) }
func ExpertsBackward(experts uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_experts_backward(C.uintptr_t(experts), args, C.uintptr_t(stream))) }
func ExpertsDescribe(experts uintptr, weights uintptr, numTokens int64, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32 { return int32(C.go_moec_experts_describe(C.uintptr_t(experts), C.uintptr_t(weights), C.int64_t(numTokens), buffer, C.uint64_t(bytes), need)) }
func LayerCreate(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_layer_create(C.uintptr_t(context), desc, out)) }
func LayerFree(layer uintptr)  { C.go_moec_layer_free(C.uintptr_t(layer)) }
func LayerQuery(layer uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_layer_query(C.uintptr_t(layer), out)) }
func LayerQueryAdapters(layer uintptr, adapters uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_layer_query_adapters(C.uintptr_t(layer), C.uintptr_t(adapters), out)) }
func LayerForward(layer uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_layer_forward(C.uintptr_t(layer), args, C.uintptr_t(stream))) }
func LayerBackward(layer uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_layer_backward(C.uintptr_t(layer), args, C.uintptr_t(stream))) }
func LayerDescribe(layer uintptr, weights uintptr, numTokens int64, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32 { return int32(C.go_moec_layer_describe(C.uintptr_t(layer), C.uintptr_t(weights), C.int64_t(numTokens), buffer, C.uint64_t(bytes), need)) }
func CommCreate(context uintptr, desc unsafe.Pointer, callbacks unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_comm_create(C.uintptr_t(context), desc, callbacks, out)) }
func CommFree(comm uintptr)  { C.go_moec_comm_free(C.uintptr_t(comm)) }
func CommAbort(comm uintptr) int32 { return int32(C.go_moec_comm_abort(C.uintptr_t(comm))) }
func CommSum(comm uintptr, inOut unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_comm_sum(C.uintptr_t(comm), inOut, C.uintptr_t(stream))) }
func EpCreate(comm uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32 { return int32(C.go_moec_ep_create(C.uintptr_t(comm), desc, out)) }
func EpFree(ep uintptr)  { C.go_moec_ep_free(C.uintptr_t(ep)) }
func EpQuery(ep uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_ep_query(C.uintptr_t(ep), out)) }
func EpDescribe(ep uintptr, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32 { return int32(C.go_moec_ep_describe(C.uintptr_t(ep), buffer, C.uint64_t(bytes), need)) }
func EpDispatch(ep uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_ep_dispatch(C.uintptr_t(ep), args, C.uintptr_t(stream))) }
func EpCombine(ep uintptr, args unsafe.Pointer, stream uintptr) int32 { return int32(C.go_moec_ep_combine(C.uintptr_t(ep), args, C.uintptr_t(stream))) }
func EpPoll(ep uintptr, out unsafe.Pointer) int32 { return int32(C.go_moec_ep_poll(C.uintptr_t(ep), out)) }
