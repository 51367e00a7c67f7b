// FP8 in blocks: 128x128 weights have one scale, and so have 128 k of a token.
#pragma once

namespace fp4d {

constexpr int kScaleBlock = 128;

}  // namespace fp4d
