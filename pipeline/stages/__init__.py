"""One public function per stage; each reads its arguments, writes under `out`, and knows nothing of caches or of other stages."""
