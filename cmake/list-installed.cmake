# Runs at the end of an installation: writes what was installed, relative to the prefix, into the tree.
set(lines "share/megaloom/installed-files\n")
foreach(path IN LISTS CMAKE_INSTALL_MANIFEST_FILES)
  file(RELATIVE_PATH path "${CMAKE_INSTALL_PREFIX}" "${path}")
  string(APPEND lines "${path}\n")
endforeach()
file(WRITE "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/share/megaloom/installed-files" "${lines}")
