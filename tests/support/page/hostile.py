"""Answers that a model may give, and that must stay text."""

HOSTILE = (
    "<script>window.ran = 1</script>",
    "<img src=x onerror='window.ran = 1'>",
    "![picture](https://evil.example/x.png)",
    "<svg onload='window.ran = 1'><script>window.ran = 1</script></svg>",
    "[click me](javascript:window.ran=1)",
    "<a href=' \tjava&#x09;script:window.ran=1'>click me</a>",
    "[data](data:text/html;base64,PHNjcmlwdD53aW5kb3cucmFuPTE8L3NjcmlwdD4=)",
    "<iframe srcdoc='<script>parent.ran = 1</script>'></iframe>",
    "<math><mtext><table><mglyph><style><!--</style>"
    "<img title='--&gt;&lt;img src=1 onerror=window.ran=1&gt;'>",
    "<form action='https://evil.example'><input autofocus onfocus='window.ran = 1'></form>",
    "<style>* { display: none }</style><p style='position: fixed; inset: 0'>over all</p>",
    "<link rel=stylesheet href='https://evil.example/x.css'>"
    "<meta http-equiv=refresh content='0;url=https://evil.example'>",
    "<base href='https://evil.example/'><object data='x'></object><embed src='x'>",
    "<p id=race class=answer name=body onclick='window.ran = 1'>clobbered</p>",
    "<details open ontoggle='window.ran = 1'><summary>open</summary></details>",
    "\u202eevil\u2066 reversed \u2069 and \u200f back",
    "Z" + "\u0351\u0489\u036b" * 400 + "algo",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 200 + "\x00\x07\x1b[31m",
    "```html\n<script>window.ran = 1</script>\n```\n"
    '<noscript><p title="</noscript><img src=x onerror=window.ran=1>">',
    "</div></section></main><script>window.ran = 1</script><!-- " + "[" * 3000 + "(" * 3000,
)
