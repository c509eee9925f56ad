"""The one C file, optional: without a compiler kvferry works, and says that it is slower."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvferry.memory._copy",
            sources=["src/kvferry/memory/_copy.c"],
            extra_compile_args=["-O3", "-std=c11", "-pthread"],
            extra_link_args=["-pthread"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
