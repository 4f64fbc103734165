// SPDX-License-Identifier: Apache-2.0
// Quantised weights from plain ones: what a description gives, and the making of it.
#pragma once

#include "backend/quantise_args.h"
#include "layer/check.h"

namespace moec {

class Quantisation {
 public:
  explicit Quantisation(const moec_quantise_desc& desc);  // throws where it says what cannot be
  void describe(moec_quantise_info& info, moec_quant& quant) const;
  // The arrays of one call.
  struct Memory {
    const void* source;
    void *codes, *scales, *scales2, *zeros, *codebook, *scale_book, *scale_offset;
    moec_buffer workspace;
  };
  Memory checked(const Context& context, const moec_quantise_args& args) const;
  void run(const Context& context, const Memory& memory, moec_stream stream) const;

 private:
  struct Shapes {  // without memory; absent: not written
    moec_tensor source, codes, scales, scales2, zeros, codebook, scale_book, scale_offset;
  };
  bool is_stream() const;  // of NF4 and FP4
  void check_blocks(const char* name) const;
  void lay_out();
  void shape_outputs();
  // The scratch of one call into `args`; memory null: *bytes gets the need.
  void take_scratch(void* memory, QuantiseArgs& args, uint64_t* bytes) const;
  uint64_t workspace() const;

  moec_quantise_desc desc_;
  uint32_t scheme_ = 0;
  int64_t block_n_ = 0, block_k_ = 0;  // values that share a scale; of a stream: 1 and a block
  QuantiseArgs args_;                  // without memory
  Shapes shapes_ = {};
  moec_quant quant_ = {};  // blocks and flags
};

}  // namespace moec
