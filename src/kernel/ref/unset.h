/* Forgets the build that was selected. No include guard: see ref.h. */
#undef REAL
#undef REF
#undef NARROW
#undef ELEMENT
#undef LOAD
#undef STORE
