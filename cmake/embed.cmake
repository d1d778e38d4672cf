# Texts of pages as constant arrays of the room `report`: a page carries its script and its style itself, and so does the
# library. cmake -DOUT=FILE -DNAMES=a;b -DFILES=x;y -P cmake/embed.cmake writes the C file.
set(text "/* Made by cmake/embed.cmake. */\n#include \"report/page.h\"\n")
foreach(name file IN ZIP_LISTS NAMES FILES)
  file(READ ${file} bytes HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${bytes}")
  string(APPEND text "const unsigned char loom__page_${name}[] = {${bytes}0};\n")
endforeach()
file(WRITE ${OUT} "${text}")
