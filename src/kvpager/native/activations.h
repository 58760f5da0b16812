// Activations of gated multilayer perceptrons, 16 floats at a time, for kernel sources alone.
#pragma once

#include "vec.h"

namespace kvpager::KV_ISA {
namespace {

// x / (1 + e^-y), where e^-y may overflow
KV_INLINE f32x16 gate(f32x16 x, f32x16 y) {
  const f32x16 down = y < -80.0f ? splat(-80.0f) : y;
  return x / (exp(-down) + 1.0f);
}

KV_INLINE f32x16 silu(f32x16 x) { return gate(x, x); }

// x/2 (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2/pi) (x + 0.044715 x^3)
KV_INLINE f32x16 gelu_tanh(f32x16 x) {
  return gate(x, x * (x * x * 0.07135481282551815f + 1.5957691216057308f));
}

// x/2 erfc(-x/sqrt(2)). erfc(z) = t e^(-z^2 + p(t)), t = 2/(2 + z) for z >= 0, with the polynomial of Press et al.,
// Numerical Recipes, "erfcc": relative error below 1.2e-7 everywhere.
KV_INLINE f32x16 gelu(f32x16 x) {
  const f32x16 z = (x < 0.0f ? -x : x) * 0.70710678118654752f;
  const f32x16 t = 2.0f / (z + 2.0f);
  f32x16 p = splat(0.17087277f);
  p = fma(p, t, splat(-0.82215223f));
  p = fma(p, t, splat(1.48851587f));
  p = fma(p, t, splat(-1.13520398f));
  p = fma(p, t, splat(0.27886807f));
  p = fma(p, t, splat(-0.18628806f));
  p = fma(p, t, splat(0.09678418f));
  p = fma(p, t, splat(0.37409196f));
  p = fma(p, t, splat(1.00002368f));
  p = fma(p, t, splat(-1.26551223f));
  const f32x16 tail = x * 0.5f * t * exp(p - z * z);
  return x < 0.0f ? tail : x - tail;
}

}  // namespace
}  // namespace kvpager::KV_ISA
