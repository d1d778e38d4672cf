# What `make install` puts where. Everything finds its neighbours from its own place, so that a prefix given at
# installation, DESTDIR, and a tree that is moved afterwards all work without configuring again.
foreach(folder BINDIR LIBDIR INCLUDEDIR DATADIR MANDIR)
  if(IS_ABSOLUTE "${CMAKE_INSTALL_${folder}}")
    message(FATAL_ERROR "CMAKE_INSTALL_${folder} is '${CMAKE_INSTALL_${folder}}': expected a folder below the prefix, "
      "such as 'lib'; the prefix is given by `make install PREFIX=…`")
  endif()
endforeach()
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/megaloom)

install(TARGETS megaloom_shared EXPORT shared)
install(TARGETS megaloom_static EXPORT static)
install(DIRECTORY include/megaloom DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
set_target_properties(megaloom_command PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
install(TARGETS megaloom_command)
install(FILES docs/megaloom.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES cli/completion.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME megaloom)
install(FILES cli/completion.zsh DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions RENAME _megaloom)

# CMake: the shared library needs nothing; the static one finds its libraries when the package is looked for.
install(EXPORT shared NAMESPACE megaloom:: FILE megaloomShared.cmake DESTINATION ${package_folder})
install(EXPORT static NAMESPACE megaloom:: FILE megaloomStatic.cmake DESTINATION ${package_folder})
configure_file(cmake/megaloomConfig.cmake.in ${CMAKE_BINARY_DIR}/package/megaloomConfig.cmake @ONLY)
include(CMakePackageConfigHelpers)
# Until 1.0 the API may change with a minor version.
write_basic_package_version_file(${CMAKE_BINARY_DIR}/package/megaloomConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/package/megaloomConfig.cmake ${CMAKE_BINARY_DIR}/package/megaloomConfigVersion.cmake
  DESTINATION ${package_folder})

# pkg-config.
file(RELATIVE_PATH to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" to_prefix ${to_prefix})
string(REPLACE ";" " " flags "${static_flags}")
configure_file(cmake/megaloom.pc.in ${CMAKE_BINARY_DIR}/package/megaloom.pc @ONLY)
install(FILES ${CMAKE_BINARY_DIR}/package/megaloom.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# The list of what was installed, for tools/uninstall. It lies in the tree itself: each prefix has its own.
install(SCRIPT cmake/list-installed.cmake)
