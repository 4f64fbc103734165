// SPDX-License-Identifier: Apache-2.0
// Code generated from moec.h by generate.py; DO NOT EDIT.

//go:build moec_purego || !cgo

package raw

import "unsafe"

var (
	Version func() uint32
	VersionString func() uintptr
	AbiVersion func() uint32
	BuildInfo func() uintptr
	StatusName func(status int32) uintptr
	LastError func(out unsafe.Pointer) int32
	StructInit func(sizedStruct uintptr, bytes uint64)
	SetLog func(sink uintptr, user uintptr, minLevel int32) int32
	BackendLoad func(path unsafe.Pointer) int32
	DeviceCount func(deviceType int32, count unsafe.Pointer) int32
	BackendDescribe func(deviceType int32, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32
	DeviceQuery func(deviceType int32, deviceId int32, out unsafe.Pointer) int32
	ContextCreate func(desc unsafe.Pointer, out unsafe.Pointer) int32
	ContextFree func(context uintptr)
	ContextDevice func(context uintptr, out unsafe.Pointer) int32
	ContextReserve func(context uintptr, bytes uint64, stream uintptr) int32
	ContextTrim func(context uintptr) int32
	ContextPoll func(context uintptr, deferred unsafe.Pointer) int32
	ContextSync func(context uintptr, stream uintptr) int32
	ContextStats func(context uintptr, out unsafe.Pointer) int32
	ContextStatsReset func(context uintptr) int32
	TensorMake func(out unsafe.Pointer, data uintptr, dtype uint32, deviceType int32, deviceId int32, ndim int32, shape unsafe.Pointer) int32
	TensorFromDlpack func(dlTensor uintptr, out unsafe.Pointer) int32
	TensorNumel func(tensor unsafe.Pointer) int64
	TensorBytes func(tensor unsafe.Pointer) int64
	TensorCheck func(tensor unsafe.Pointer) int32
	BufferAlloc func(context uintptr, bytes uint64, out unsafe.Pointer) int32
	BufferFree func(context uintptr, buffer unsafe.Pointer) int32
	TensorCopy func(context uintptr, source unsafe.Pointer, target unsafe.Pointer, stream uintptr) int32
	TensorZero func(context uintptr, tensor unsafe.Pointer, stream uintptr) int32
	RouterCreate func(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32
	RouterFree func(router uintptr)
	GateForward func(router uintptr, args unsafe.Pointer, stream uintptr) int32
	GateBackward func(router uintptr, args unsafe.Pointer, stream uintptr) int32
	RouteForward func(router uintptr, args unsafe.Pointer, stream uintptr) int32
	RouteBackward func(router uintptr, args unsafe.Pointer, stream uintptr) int32
	RouterBiasUpdate func(router uintptr, counts unsafe.Pointer, rate float32, bias unsafe.Pointer, stream uintptr) int32
	LossForward func(context uintptr, args unsafe.Pointer, stream uintptr) int32
	LossBackward func(context uintptr, args unsafe.Pointer, stream uintptr) int32
	PlanSize func(desc unsafe.Pointer, bytes unsafe.Pointer, maxRows unsafe.Pointer) int32
	PlanCreate func(context uintptr, desc unsafe.Pointer, memory unsafe.Pointer, out unsafe.Pointer) int32
	PlanFree func(plan uintptr)
	PlanFromTopk func(plan uintptr, expertIds unsafe.Pointer, routingWeights unsafe.Pointer, stream uintptr) int32
	PlanFromLogits func(plan uintptr, router uintptr, args unsafe.Pointer, stream uintptr) int32
	PlanFromMap func(plan uintptr, routingMap unsafe.Pointer, probs unsafe.Pointer, stream uintptr) int32
	PlanFromRule func(plan uintptr, rule uint32, numTokens int64, routingWeights unsafe.Pointer, stream uintptr) int32
	PlanFromScores func(plan uintptr, scores unsafe.Pointer, tokenMask unsafe.Pointer, stream uintptr) int32
	PlanAttach func(plan uintptr, numTokens int64) int32
	PlanView func(plan uintptr, field int32, out unsafe.Pointer) int32
	PlanExport func(plan uintptr, field int32, dst unsafe.Pointer, stream uintptr) int32
	PlanTotalsSync func(plan uintptr, totals unsafe.Pointer, stream uintptr) int32
	PlanSaveSync func(plan uintptr, buffer uintptr, bytes uint64, need unsafe.Pointer, stream uintptr) int32
	PlanRestoreSync func(plan uintptr, buffer uintptr, bytes uint64, stream uintptr) int32
	Permute func(context uintptr, args unsafe.Pointer, stream uintptr) int32
	Unpermute func(context uintptr, args unsafe.Pointer, stream uintptr) int32
	PermuteBackward func(context uintptr, args unsafe.Pointer, stream uintptr) int32
	UnpermuteBackward func(context uintptr, args unsafe.Pointer, stream uintptr) int32
	WeightsCreate func(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32
	WeightsFree func(weights uintptr)
	WeightsBind func(weights uintptr, set unsafe.Pointer) int32
	WeightsQuery func(weights uintptr, out unsafe.Pointer) int32
	WeightsPack func(weights uintptr, memory unsafe.Pointer, stream uintptr) int32
	WeightsRefresh func(weights uintptr, first int32, count int32, stream uintptr) int32
	WeightsDequantise func(weights uintptr, matrix uint32, expert int32, to unsafe.Pointer, stream uintptr) int32
	WeightsReleaseSource func(weights uintptr) int32
	WeightsUnpack func(weights uintptr, to unsafe.Pointer, stream uintptr) int32
	WeightsSaveSync func(weights uintptr, path unsafe.Pointer) int32
	WeightsMapSync func(weights uintptr, path unsafe.Pointer) int32
	QuantiseQuery func(context uintptr, desc unsafe.Pointer, info unsafe.Pointer, quant unsafe.Pointer) int32
	Quantise func(context uintptr, args unsafe.Pointer, stream uintptr) int32
	AdaptersCreate func(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32
	AdaptersFree func(adapters uintptr)
	AdaptersBind func(adapters uintptr, list unsafe.Pointer, count int32) int32
	AdaptersMerge func(adapters uintptr, weights uintptr, stream uintptr) int32
	AdaptersUnmerge func(adapters uintptr, weights uintptr, stream uintptr) int32
	AdaptersMergeCopy func(adapters uintptr, weights uintptr, matrix uint32, values unsafe.Pointer, quantised unsafe.Pointer, stream uintptr) int32
	ExpertsCreate func(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32
	ExpertsFree func(experts uintptr)
	ExpertsQuery func(experts uintptr, out unsafe.Pointer) int32
	ExpertsQueryAdapters func(experts uintptr, adapters uintptr, out unsafe.Pointer) int32
	ExpertsForward func(experts uintptr, args unsafe.Pointer, stream uintptr) int32
	ExpertsBackward func(experts uintptr, args unsafe.Pointer, stream uintptr) int32
	ExpertsDescribe func(experts uintptr, weights uintptr, numTokens int64, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32
	LayerCreate func(context uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32
	LayerFree func(layer uintptr)
	LayerQuery func(layer uintptr, out unsafe.Pointer) int32
	LayerQueryAdapters func(layer uintptr, adapters uintptr, out unsafe.Pointer) int32
	LayerForward func(layer uintptr, args unsafe.Pointer, stream uintptr) int32
	LayerBackward func(layer uintptr, args unsafe.Pointer, stream uintptr) int32
	LayerDescribe func(layer uintptr, weights uintptr, numTokens int64, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32
	CommCreate func(context uintptr, desc unsafe.Pointer, callbacks unsafe.Pointer, out unsafe.Pointer) int32
	CommFree func(comm uintptr)
	CommAbort func(comm uintptr) int32
	CommSum func(comm uintptr, inOut unsafe.Pointer, stream uintptr) int32
	EpCreate func(comm uintptr, desc unsafe.Pointer, out unsafe.Pointer) int32
	EpFree func(ep uintptr)
	EpQuery func(ep uintptr, out unsafe.Pointer) int32
	EpDescribe func(ep uintptr, buffer unsafe.Pointer, bytes uint64, need unsafe.Pointer) int32
	EpDispatch func(ep uintptr, args unsafe.Pointer, stream uintptr) int32
	EpCombine func(ep uintptr, args unsafe.Pointer, stream uintptr) int32
	EpPoll func(ep uintptr, out unsafe.Pointer) int32
)

var symbols = map[string]any{
	"moec_version": &Version,
	"moec_version_string": &VersionString,
	"moec_abi_version": &AbiVersion,
	"moec_build_info": &BuildInfo,
	"moec_status_name": &StatusName,
	"moec_last_error": &LastError,
	"moec_struct_init": &StructInit,
	"moec_set_log": &SetLog,
	"moec_backend_load": &BackendLoad,
	"moec_device_count": &DeviceCount,
	"moec_backend_describe": &BackendDescribe,
	"moec_device_query": &DeviceQuery,
	"moec_context_create": &ContextCreate,
	"moec_context_free": &ContextFree,
	"moec_context_device": &ContextDevice,
	"moec_context_reserve": &ContextReserve,
	"moec_context_trim": &ContextTrim,
	"moec_context_poll": &ContextPoll,
	"moec_context_sync": &ContextSync,
	"moec_context_stats": &ContextStats,
	"moec_context_stats_reset": &ContextStatsReset,
	"moec_tensor_make": &TensorMake,
	"moec_tensor_from_dlpack": &TensorFromDlpack,
	"moec_tensor_numel": &TensorNumel,
	"moec_tensor_bytes": &TensorBytes,
	"moec_tensor_check": &TensorCheck,
	"moec_buffer_alloc": &BufferAlloc,
	"moec_buffer_free": &BufferFree,
	"moec_tensor_copy": &TensorCopy,
	"moec_tensor_zero": &TensorZero,
	"moec_router_create": &RouterCreate,
	"moec_router_free": &RouterFree,
	"moec_gate_forward": &GateForward,
	"moec_gate_backward": &GateBackward,
	"moec_route_forward": &RouteForward,
	"moec_route_backward": &RouteBackward,
	"moec_router_bias_update": &RouterBiasUpdate,
	"moec_loss_forward": &LossForward,
	"moec_loss_backward": &LossBackward,
	"moec_plan_size": &PlanSize,
	"moec_plan_create": &PlanCreate,
	"moec_plan_free": &PlanFree,
	"moec_plan_from_topk": &PlanFromTopk,
	"moec_plan_from_logits": &PlanFromLogits,
	"moec_plan_from_map": &PlanFromMap,
	"moec_plan_from_rule": &PlanFromRule,
	"moec_plan_from_scores": &PlanFromScores,
	"moec_plan_attach": &PlanAttach,
	"moec_plan_view": &PlanView,
	"moec_plan_export": &PlanExport,
	"moec_plan_totals_sync": &PlanTotalsSync,
	"moec_plan_save_sync": &PlanSaveSync,
	"moec_plan_restore_sync": &PlanRestoreSync,
	"moec_permute": &Permute,
	"moec_unpermute": &Unpermute,
	"moec_permute_backward": &PermuteBackward,
	"moec_unpermute_backward": &UnpermuteBackward,
	"moec_weights_create": &WeightsCreate,
	"moec_weights_free": &WeightsFree,
	"moec_weights_bind": &WeightsBind,
	"moec_weights_query": &WeightsQuery,
	"moec_weights_pack": &WeightsPack,
	"moec_weights_refresh": &WeightsRefresh,
	"moec_weights_dequantise": &WeightsDequantise,
	"moec_weights_release_source": &WeightsReleaseSource,
	"moec_weights_unpack": &WeightsUnpack,
	"moec_weights_save_sync": &WeightsSaveSync,
	"moec_weights_map_sync": &WeightsMapSync,
	"moec_quantise_query": &QuantiseQuery,
	"moec_quantise": &Quantise,
	"moec_adapters_create": &AdaptersCreate,
	"moec_adapters_free": &AdaptersFree,
	"moec_adapters_bind": &AdaptersBind,
	"moec_adapters_merge": &AdaptersMerge,
	"moec_adapters_unmerge": &AdaptersUnmerge,
	"moec_adapters_merge_copy": &AdaptersMergeCopy,
	"moec_experts_create": &ExpertsCreate,
	"moec_experts_free": &ExpertsFree,
	"moec_experts_query": &ExpertsQuery,
	"moec_experts_query_adapters": &ExpertsQueryAdapters,
	"moec_experts_forward": &ExpertsForward,
	"moec_experts_backward": &ExpertsBackward,
	"moec_experts_describe": &ExpertsDescribe,
	"moec_layer_create": &LayerCreate,
	"moec_layer_free": &LayerFree,
	"moec_layer_query": &LayerQuery,
	"moec_layer_query_adapters": &LayerQueryAdapters,
	"moec_layer_forward": &LayerForward,
	"moec_layer_backward": &LayerBackward,
	"moec_layer_describe": &LayerDescribe,
	"moec_comm_create": &CommCreate,
	"moec_comm_free": &CommFree,
	"moec_comm_abort": &CommAbort,
	"moec_comm_sum": &CommSum,
	"moec_ep_create": &EpCreate,
	"moec_ep_free": &EpFree,
	"moec_ep_query": &EpQuery,
	"moec_ep_describe": &EpDescribe,
	"moec_ep_dispatch": &EpDispatch,
	"moec_ep_combine": &EpCombine,
	"moec_ep_poll": &EpPoll,
}

var _ unsafe.Pointer
