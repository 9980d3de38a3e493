// The view of a row is in the page as it is.
hookscope.openLayer = () => {};

{
  // A click anywhere in a row opens it.
  addEventListener("click", (event) => {
    const row = event.target.closest?.(".calls tbody tr");
    if (row && !event.target.closest("a, button") && getSelection().isCollapsed) row.querySelector("th a").click();
  });
}
